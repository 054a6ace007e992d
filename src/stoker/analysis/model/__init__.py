"""How fast training runs, by arithmetic on measured rates."""
