"""Alembic's entry point. `tiledsched.store.engine` runs it over a connection it already holds a transaction on."""

from alembic import context

from tiledsched.core.errors import DatabaseError
from tiledsched.store.engine import VERSION_TABLE
from tiledsched.store.models import Base

connection = context.config.attributes.get("connection")
if connection is None:
    raise DatabaseError("migrations run through tiledsched itself, whenever it opens a database")
context.configure(
    connection=connection,
    target_metadata=Base.metadata,
    version_table=VERSION_TABLE,
    render_as_batch=True,  # SQLite alters a table by making a new one
    transactional_ddl=True,
    compare_type=True,
)
with context.begin_transaction():
    context.run_migrations()
