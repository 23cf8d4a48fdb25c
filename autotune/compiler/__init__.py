"""Candidate -> compiled evidence: worker processes, the parser of their dumps, the cache."""
