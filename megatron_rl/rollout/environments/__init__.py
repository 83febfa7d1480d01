"""Environments that answer the policy between its turns."""
