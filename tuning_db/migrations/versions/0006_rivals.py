"""What rivals took beside an entry's winner: a column of JSON, null where none was timed. All entries stay."""

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None


def upgrade():
    op.add_column("entries", sa.Column("rivals", sa.JSON(), nullable=True))
