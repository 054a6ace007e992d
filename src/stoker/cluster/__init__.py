"""A cache spread over the memories of several nodes, and Ray actors as workers."""
