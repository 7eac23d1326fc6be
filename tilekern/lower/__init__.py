"""From block IR to a target: one package a backend, none of which knows another."""
