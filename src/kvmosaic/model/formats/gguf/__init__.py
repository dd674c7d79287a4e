"""GGUF files: the model format of llama.cpp, dequantized when it is loaded.

file      header: metadata and the table of tensors
checks    whether a file can be loaded
weights   configuration and weights
tokenizer its tokenizer
"""
