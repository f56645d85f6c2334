"""The embedded demo: word problems and their tokenizer."""
