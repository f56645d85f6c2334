"""Controlled ablations: arms that are trained, evaluated and compared from one YAML."""
