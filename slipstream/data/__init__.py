"""Data sets: sources, schemas, prompts, synthetic stand-ins and the tiny policy's tokenizer."""
