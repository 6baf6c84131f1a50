"""Problems of any kernel: its name and its values as JSON, and ids that hash both. All rows so far are attention's.

What points at a problem follows it to its new id; measurements, failures and entries stay as they are otherwise. A problem
that rows of several kernels point at becomes one for each. Kernel names have room for `module:Class`.
"""

import hashlib
import json

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None

OLD = sa.table(
    "problems",
    *(
        sa.column(name, sa.Integer())
        for name in ("seq_q", "seq_k", "head_dim", "batch", "heads", "kv_heads", "value_dim")
    ),
    *(sa.column(name, sa.Boolean()) for name in ("causal", "lse")),
    *(sa.column(name, sa.String()) for name in ("id", "dtype", "alignment")),
)
LATER = {"alignment": "top_left", "value_dim": 0, "lse": False}
"""Fields that came later are left out at these values, so that ids are those of problems stored before there were any."""
NEW = sa.table("problems", sa.column("id", sa.String()), sa.column("kernel", sa.String()), sa.column("dims", sa.JSON()))
POINTING = ("measurements", "failures", "entries")


def problem_id(kernel, dims):
    text = json.dumps({"kernel": kernel, **dims}, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def upgrade():
    connection = op.get_bind()
    columns = [column.name for column in OLD.c if column.name != "id"]
    found = {}
    for row in connection.execute(sa.select(OLD)).mappings():
        values = {name: row[name] for name in columns}
        found[row["id"]] = {name: value for name, value in values.items() if (name, value) not in LATER.items()}
    tables = [sa.table(name, sa.column("kernel"), sa.column("problem_id")) for name in POINTING]
    used = {
        tuple(row)
        for table in tables
        for row in connection.execute(sa.select(table.c.problem_id, table.c.kernel).distinct())
    }
    used |= {(old, "attention") for old in set(found) - {old for old, _ in used}}

    sqlite = connection.dialect.name == "sqlite"
    if sqlite:  # references are by name, and not looked at while a schema is upgraded
        op.drop_table("problems")
        op.create_table(
            "problems",
            sa.Column("id", sa.String(12), nullable=False),
            sa.Column("kernel", sa.String(200), nullable=False),
            sa.Column("dims", sa.JSON(), nullable=False),
            sa.PrimaryKeyConstraint("id", name="pk_problems"),
        )
    else:
        op.add_column("problems", sa.Column("kernel", sa.String(200), nullable=True))
        op.add_column("problems", sa.Column("dims", sa.JSON(), nullable=True))
        for name in columns:
            op.drop_column("problems", name)
    new = {(old, kernel): problem_id(kernel, found[old]) for old, kernel in used if old in found}
    rows = [{"id": identity, "kernel": kernel, "dims": found[old]} for (old, kernel), identity in new.items()]
    if rows:
        connection.execute(sa.insert(NEW), rows)
    for (old, kernel), identity in new.items():
        for table in tables:
            pointing = (table.c.problem_id == old) & (table.c.kernel == kernel)
            connection.execute(sa.update(table).where(pointing).values(problem_id=identity))
    if not sqlite:
        connection.execute(sa.delete(NEW).where(NEW.c.kernel.is_(None)))
        op.alter_column("problems", "kernel", nullable=False)
        op.alter_column("problems", "dims", nullable=False)
        for name in ("builds", *POINTING):  # SQLite takes any length as it is
            op.alter_column(name, "kernel", type_=sa.String(200))
    op.create_index("ix_problems_kernel", "problems", ["kernel"])
    op.create_table(
        "kernel_views",
        sa.Column("name", sa.String(63), nullable=False),
        sa.Column("kernel", sa.String(200), nullable=False),
        sa.Column("definition", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("name", name="pk_kernel_views"),
        sa.UniqueConstraint("kernel", name="uq_kernel_views_kernel"),
    )
