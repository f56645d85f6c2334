"""Tasks, scorers and likelihoods: how good a model's answers are, with the decoder that is used in earnest."""
