"""One preparation for many jobs: coordinated prep (Mohan et al., VLDB 2021, section 6.3)."""
