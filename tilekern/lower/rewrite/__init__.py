"""Rewrites of block IR that several backends share. They know no target: `Capabilities` describes it."""
