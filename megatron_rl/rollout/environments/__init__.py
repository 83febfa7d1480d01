"""Environments that reply to the policy between its turns."""
