"""Whether trainer and engines compute the same, and where not: `checks` has what a run asks, `locate` walks both through one prompt."""
