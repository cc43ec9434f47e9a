"""Chats as text: the messages of a chat, a model's chat template, and the answers in what the template renders.

These modules import only the standard library, Jinja and trainer.contract, so that hpcgen can use them without torch.
"""
