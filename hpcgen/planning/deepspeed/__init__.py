"""DeepSpeed's configuration of a program: keys, rules, batch sizes, the job's file and a memory estimate.

The facts are those of DeepSpeed 0.19.8, and of transformers 5.23 for values that Hugging Face's Trainer fills in.
Paths in docstrings are relative to the package `deepspeed` unless they begin with another package. hpcgen never
imports DeepSpeed.
"""
