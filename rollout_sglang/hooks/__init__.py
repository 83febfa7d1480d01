"""Every patch of SGLang, each behind the version check of `registry`."""
