"""Attacks, each as a test: a real node and real peers with daemons of their own on the loopback interface, and enemies
among them.

What is asserted are events, not speed: rounds go on with the honest peers' work, no process ends, disk and memory stay
within their bounds, and the operator is told who it was and what it did.
"""
