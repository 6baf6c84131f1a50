"""One entry for each compiler: its version becomes part of what an entry is unique on. All entries stay.

Views over entries are taken down and put up again as they were; whoever writes next makes them with the new column.
"""

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None

OLD_KEY = ("kernel", "arch", "problem_id", "device_name", "regime", "accum_mode")
ENTRIES = sa.table("entries", sa.column("toolchain_id"), sa.column("compiler"))
TOOLCHAINS = sa.table("toolchains", sa.column("id"), sa.column("tileiras"))


def upgrade():
    connection = op.get_bind()
    views = connection.execute(sa.text("SELECT name, definition FROM kernel_views ORDER BY name")).all()
    for name, _ in views:
        connection.exec_driver_sql(f'DROP VIEW IF EXISTS "{name}"')
    op.add_column("entries", sa.Column("compiler", sa.String(64), nullable=True))
    its = sa.select(TOOLCHAINS.c.tileiras).where(TOOLCHAINS.c.id == ENTRIES.c.toolchain_id).scalar_subquery()
    connection.execute(sa.update(ENTRIES).values(compiler=sa.func.coalesce(its, "")))
    with op.batch_alter_table("entries") as table:
        table.alter_column("compiler", existing_type=sa.String(64), nullable=False)
        table.drop_constraint("uq_entries_key", type_="unique")
        table.create_unique_constraint("uq_entries_key", [*OLD_KEY, "compiler"])
    for name, definition in views:
        connection.exec_driver_sql(f'CREATE VIEW "{name}" AS {definition}')
