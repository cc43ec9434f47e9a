"""Samples of chats: how many tokens of each chat are read, and which chats share a sample.

These modules import only the standard library, numpy and trainer.contract, so that hpcgen can tell before the queue
what the trainer will read.
"""
