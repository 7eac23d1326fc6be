"""What the `legalize` of several backends is made of: rewrites of block IR that know no target."""
