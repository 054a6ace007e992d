"""The pools of echoes, on ordinals: the items that are used next, by a factor or by the clock."""
