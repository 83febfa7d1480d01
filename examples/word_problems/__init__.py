"""A task for a pre-trained model: word problems of one step, in plain English, to be answered in a short sentence."""
