"""The stages of the chain, one file a Flyte task: each reads and writes directories and logs one MLflow run.

Engines and learners live in processes of their own and never at the same time as one another's work: on a small
machine two of them at once slow each other many times over.
"""
