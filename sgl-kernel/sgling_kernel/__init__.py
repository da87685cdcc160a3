"""SGLing operators: one package per op, each with a plain torch specification in ``reference.py``."""
