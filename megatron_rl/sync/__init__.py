"""Weight sync from the trainer to the inference engines, with a proof that every byte arrived."""
