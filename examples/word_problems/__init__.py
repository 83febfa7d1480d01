"""A task for a pre-trained model: one-step word problems, answered in a short sentence."""
