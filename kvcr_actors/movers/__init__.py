"""The lower half: what copies pages between an engine's pools and host slots, and decides on neither.

An order is plain values. It is answered once, when its memory is quiet; whether its bytes came is part of the answer.
"""
