"""The store: every build, measurement and failure, and what is served. `db.TuningDB` is the way in.

Nothing is imported here, so that :mod:`tiledsched.store.records` costs no SQLAlchemy.
"""
