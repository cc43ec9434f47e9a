"""Export to Hugging Face directories and import from them, tensor by tensor, on a CPU.

`trainer.contract.families` defines the supported families. `exporting` and `importing` are the two directions;
`python -m trainer.huggingface` runs them. Neither builds a model or connects ranks; only `check` does.
"""
