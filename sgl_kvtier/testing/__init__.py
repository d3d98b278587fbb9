"""What the tests of a HiCache backend need, for this backend and for any other.

* :mod:`sgl_kvtier.testing.pools`: SGLang's own host pools on the CPU, and the canonical bytes of their pages.
* :mod:`sgl_kvtier.testing.conformance`: :class:`BackendConformance`, a class of pytest methods to subclass.
* :mod:`sgl_kvtier.testing.machine`: a Hypothesis state machine that compares a backend with a dictionary.

Needs SGLang, pytest and Hypothesis; none of them is imported until one of the modules is.
"""
