"""Transports: how chunks of weights get from trainer ranks to engine ranks, one a file."""
