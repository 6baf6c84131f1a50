"""Problems: where the causal diagonal lies, columns of v, and whether the log-sum-exp is returned."""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade():
    op.add_column("problems", sa.Column("alignment", sa.String(16), nullable=False, server_default="top_left"))
    op.add_column("problems", sa.Column("value_dim", sa.Integer(), nullable=False, server_default="0"))
    op.add_column("problems", sa.Column("lse", sa.Boolean(), nullable=False, server_default=sa.false()))
