"""Campaigns of many GPUs: what is to be done, who has it until when, and what came of it. Nothing that was there changes."""

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None

TIME = sa.DateTime(timezone=True)


def text(name, length=None, nullable=False):
    return sa.Column(name, sa.String(length) if length else sa.Text(), nullable=nullable)


def key(name, kind):
    return sa.Column(name, kind, nullable=False)


def upgrade():
    op.create_table(
        "fleet_campaigns",
        text("id", 12),
        text("job", 200),
        text("kernel", 400),
        key("options", sa.JSON()),
        text("compiler", 64),
        text("source_hash", 64),
        key("lease_s", sa.Float()),
        key("deadline_s", sa.Float()),
        key("most_attempts", sa.Integer()),
        text("status", 16),
        key("created_at", TIME),
        sa.Column("ends_at", TIME),
        sa.Column("finished_at", TIME),
        sa.PrimaryKeyConstraint("id", name="pk_fleet_campaigns"),
    )
    op.create_table(
        "fleet_workers",
        text("id", 12),
        text("campaign_id", 12),
        text("hostname", 255),
        key("pid", sa.Integer()),
        text("gpu", 64),
        text("device_name", 128),
        text("arch", 16),
        text("state", 16),
        text("note"),
        key("conditions", sa.JSON()),
        key("started_at", TIME),
        key("seen_at", TIME),
        sa.PrimaryKeyConstraint("id", name="pk_fleet_workers"),
        sa.ForeignKeyConstraint(["campaign_id"], ["fleet_campaigns.id"], name="fk_fleet_workers_campaign_id"),
    )
    op.create_index("ix_fleet_workers_campaign_id", "fleet_workers", ["campaign_id"])
    op.create_table(
        "fleet_leases",
        key("id", sa.Integer()),
        text("campaign_id", 12),
        key("number", sa.Integer()),
        text("arch", 16),
        text("problem_id", 12),
        text("state", 16),
        key("attempts", sa.Integer()),
        text("worker_id", 12, nullable=True),
        sa.Column("until", TIME),
        sa.Column("result", sa.JSON()),
        text("message"),
        sa.Column("done_at", TIME),
        sa.PrimaryKeyConstraint("id", name="pk_fleet_leases"),
        sa.ForeignKeyConstraint(["campaign_id"], ["fleet_campaigns.id"], name="fk_fleet_leases_campaign_id"),
        sa.ForeignKeyConstraint(["problem_id"], ["problems.id"], name="fk_fleet_leases_problem_id"),
        sa.ForeignKeyConstraint(["worker_id"], ["fleet_workers.id"], name="fk_fleet_leases_worker_id"),
        sa.UniqueConstraint("campaign_id", "arch", "problem_id", name="uq_fleet_leases_key"),
    )
    op.create_index("ix_fleet_leases_next", "fleet_leases", ["campaign_id", "state", "arch", "attempts", "number"])
    op.create_index("ix_fleet_leases_worker_id", "fleet_leases", ["worker_id"])
    op.create_table(
        "fleet_attempts",
        key("id", sa.Integer()),
        key("lease_id", sa.Integer()),
        key("number", sa.Integer()),
        text("worker_id", 12),
        key("started_at", TIME),
        sa.Column("ended_at", TIME),
        text("outcome", 16),
        text("message"),
        sa.Column("result", sa.JSON()),
        sa.PrimaryKeyConstraint("id", name="pk_fleet_attempts"),
        sa.ForeignKeyConstraint(["lease_id"], ["fleet_leases.id"], name="fk_fleet_attempts_lease_id"),
        sa.ForeignKeyConstraint(["worker_id"], ["fleet_workers.id"], name="fk_fleet_attempts_worker_id"),
    )
    op.create_index("ix_fleet_attempts_lease_id", "fleet_attempts", ["lease_id"])
    op.create_index("ix_fleet_attempts_worker_id", "fleet_attempts", ["worker_id"])
    op.create_table(
        "fleet_controls",
        key("id", sa.Integer()),
        text("campaign_id", 12),
        text("worker_id", 12),
        text("gpu", 64),
        text("arch", 16),
        text("fingerprint", 64),
        key("median_us", sa.Float()),
        key("ci_low_us", sa.Float()),
        key("ci_high_us", sa.Float()),
        key("conditions", sa.JSON()),
        key("taken_at", TIME),
        sa.PrimaryKeyConstraint("id", name="pk_fleet_controls"),
        sa.ForeignKeyConstraint(["campaign_id"], ["fleet_campaigns.id"], name="fk_fleet_controls_campaign_id"),
        sa.ForeignKeyConstraint(["worker_id"], ["fleet_workers.id"], name="fk_fleet_controls_worker_id"),
    )
    op.create_index("ix_fleet_controls_campaign_id", "fleet_controls", ["campaign_id"])
