from tests.stores.conftest import make_store

__all__ = ["make_store"]
