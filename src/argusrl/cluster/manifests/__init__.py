"""Kubernetes objects of a run, built as plain values: what `argusrl cluster manifest` and `install` render.

render.py puts together what pods.py, storage.py, access.py, recipe.py and job.py build; install.py is the
administrator's part; check.py and what it calls validate manifests without a cluster.
"""
