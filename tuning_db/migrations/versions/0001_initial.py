"""Initial schema."""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade():
    op.create_table(
        "devices",
        sa.Column("id", sa.String(12), nullable=False),
        sa.Column("name", sa.String(128), nullable=False),
        sa.Column("arch", sa.String(16), nullable=False),
        sa.Column("device", sa.JSON(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_devices"),
    )
    op.create_index("ix_devices_name", "devices", ["name"])
    op.create_table(
        "toolchains",
        sa.Column("id", sa.String(12), nullable=False),
        sa.Column("cuda_tile", sa.String(64), nullable=False),
        sa.Column("tileiras", sa.String(64), nullable=False),
        sa.Column("ptxas", sa.String(64), nullable=False),
        sa.Column("nvvm", sa.String(64), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_toolchains"),
    )
    op.create_table(
        "problems",
        sa.Column("id", sa.String(12), nullable=False),
        sa.Column("seq_q", sa.Integer(), nullable=False),
        sa.Column("seq_k", sa.Integer(), nullable=False),
        sa.Column("head_dim", sa.Integer(), nullable=False),
        sa.Column("dtype", sa.String(16), nullable=False),
        sa.Column("causal", sa.Boolean(), nullable=False),
        sa.Column("batch", sa.Integer(), nullable=False),
        sa.Column("heads", sa.Integer(), nullable=False),
        sa.Column("kv_heads", sa.Integer(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_problems"),
    )
    op.create_table(
        "schedules",
        sa.Column("id", sa.String(12), nullable=False),
        sa.Column("knobs", sa.JSON(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_schedules"),
    )
    op.create_table(
        "artifacts",
        sa.Column("arch", sa.String(16), nullable=False),
        sa.Column("fingerprint", sa.String(64), nullable=False),
        sa.Column("facts", sa.JSON(), nullable=True),
        sa.Column("cubin_bytes", sa.Integer(), nullable=False),
        sa.PrimaryKeyConstraint("arch", "fingerprint", name="pk_artifacts"),
    )
    op.create_table(
        "builds",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("kernel", sa.String(64), nullable=False),
        sa.Column("source_hash", sa.String(64), nullable=False),
        sa.Column("toolchain_id", sa.String(12), nullable=False),
        sa.Column("arch", sa.String(16), nullable=False),
        sa.Column("schedule_id", sa.String(12), nullable=False),
        sa.Column("problem_class_id", sa.String(12), nullable=False),
        sa.Column("problem_class", sa.JSON(), nullable=False),
        sa.Column("fingerprint", sa.String(64), nullable=True),
        sa.Column("failure_kind", sa.String(32), nullable=True),
        sa.Column("failure_message", sa.Text(), nullable=True),
        sa.Column("seconds", sa.Float(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.CheckConstraint("(fingerprint IS NULL) <> (failure_kind IS NULL)", name=op.f("ck_builds_outcome")),
        sa.ForeignKeyConstraint(
            ["arch", "fingerprint"], ["artifacts.arch", "artifacts.fingerprint"], name="fk_builds_arch_fingerprint"
        ),
        sa.ForeignKeyConstraint(["schedule_id"], ["schedules.id"], name="fk_builds_schedule_id"),
        sa.ForeignKeyConstraint(["toolchain_id"], ["toolchains.id"], name="fk_builds_toolchain_id"),
        sa.PrimaryKeyConstraint("id", name="pk_builds"),
        sa.UniqueConstraint(
            "kernel", "source_hash", "toolchain_id", "arch", "schedule_id", "problem_class_id", name="uq_builds_key"
        ),
    )
    op.create_table(
        "runs",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("status", sa.String(16), nullable=False),
        sa.Column("command", sa.JSON(), nullable=False),
        sa.Column("arch", sa.String(16), nullable=False),
        sa.Column("hostname", sa.String(255), nullable=False),
        sa.Column("pid", sa.Integer(), nullable=False),
        sa.Column("host", sa.JSON(), nullable=False),
        sa.Column("started_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("finished_at", sa.DateTime(timezone=True), nullable=True),
        sa.PrimaryKeyConstraint("id", name="pk_runs"),
    )
    op.create_index("ix_runs_status", "runs", ["status"])
    op.create_table(
        "measurements",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("uid", sa.String(24), nullable=False),
        sa.Column("run_id", sa.Integer(), nullable=True),
        sa.Column("kernel", sa.String(64), nullable=False),
        sa.Column("source_hash", sa.String(64), nullable=False),
        sa.Column("toolchain_id", sa.String(12), nullable=False),
        sa.Column("problem_id", sa.String(12), nullable=False),
        sa.Column("schedule_id", sa.String(12), nullable=False),
        sa.Column("device_id", sa.String(12), nullable=False),
        sa.Column("arch", sa.String(16), nullable=False),
        sa.Column("fingerprint", sa.String(64), nullable=False),
        sa.Column("regime", sa.String(16), nullable=False),
        sa.Column("runner", sa.String(16), nullable=False),
        sa.Column("median_us", sa.Float(), nullable=False),
        sa.Column("ci_low_us", sa.Float(), nullable=False),
        sa.Column("ci_high_us", sa.Float(), nullable=False),
        sa.Column("samples_us", sa.JSON(), nullable=False),
        sa.Column("sample_count", sa.Integer(), nullable=False),
        sa.Column("accuracy", sa.JSON(), nullable=True),
        sa.Column("conditions", sa.JSON(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.ForeignKeyConstraint(
            ["arch", "fingerprint"],
            ["artifacts.arch", "artifacts.fingerprint"],
            name="fk_measurements_arch_fingerprint",
        ),
        sa.ForeignKeyConstraint(["device_id"], ["devices.id"], name="fk_measurements_device_id"),
        sa.ForeignKeyConstraint(["problem_id"], ["problems.id"], name="fk_measurements_problem_id"),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name="fk_measurements_run_id"),
        sa.ForeignKeyConstraint(["schedule_id"], ["schedules.id"], name="fk_measurements_schedule_id"),
        sa.ForeignKeyConstraint(["toolchain_id"], ["toolchains.id"], name="fk_measurements_toolchain_id"),
        sa.PrimaryKeyConstraint("id", name="pk_measurements"),
        sa.UniqueConstraint("uid", name="uq_measurements_uid"),
    )
    op.create_index("ix_measurements_arch_fingerprint", "measurements", ["arch", "fingerprint"])
    op.create_index(
        "ix_measurements_problem_id_device_id_regime", "measurements", ["problem_id", "device_id", "regime"]
    )
    op.create_table(
        "failures",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("run_id", sa.Integer(), nullable=True),
        sa.Column("kernel", sa.String(64), nullable=False),
        sa.Column("arch", sa.String(16), nullable=False),
        sa.Column("stage", sa.String(16), nullable=False),
        sa.Column("problem_id", sa.String(12), nullable=True),
        sa.Column("schedule_id", sa.String(12), nullable=False),
        sa.Column("fingerprint", sa.String(64), nullable=True),
        sa.Column("device_id", sa.String(12), nullable=True),
        sa.Column("kind", sa.String(32), nullable=False),
        sa.Column("message", sa.Text(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.ForeignKeyConstraint(["device_id"], ["devices.id"], name="fk_failures_device_id"),
        sa.ForeignKeyConstraint(["problem_id"], ["problems.id"], name="fk_failures_problem_id"),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name="fk_failures_run_id"),
        sa.ForeignKeyConstraint(["schedule_id"], ["schedules.id"], name="fk_failures_schedule_id"),
        sa.PrimaryKeyConstraint("id", name="pk_failures"),
    )
    op.create_index("ix_failures_arch", "failures", ["arch"])
    op.create_index("ix_failures_problem_id", "failures", ["problem_id"])
    op.create_table(
        "entries",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("kernel", sa.String(64), nullable=False),
        sa.Column("arch", sa.String(16), nullable=False),
        sa.Column("problem_id", sa.String(12), nullable=False),
        sa.Column("device_name", sa.String(128), nullable=False),
        sa.Column("regime", sa.String(16), nullable=False),
        sa.Column("accum_mode", sa.String(16), nullable=False),
        sa.Column("provenance", sa.String(16), nullable=False),
        sa.Column("schedule_id", sa.String(12), nullable=False),
        sa.Column("fingerprint", sa.String(64), nullable=True),
        sa.Column("measurement_id", sa.Integer(), nullable=True),
        sa.Column("model_us", sa.Float(), nullable=True),
        sa.Column("runner_up_id", sa.String(12), nullable=True),
        sa.Column("margin", sa.Float(), nullable=True),
        sa.Column("ties", sa.JSON(), nullable=False),
        sa.Column("candidates", sa.Integer(), nullable=False),
        sa.Column("source", sa.Text(), nullable=False),
        sa.Column("toolchain_id", sa.String(12), nullable=True),
        sa.Column("source_hash", sa.String(64), nullable=False),
        sa.Column("run_id", sa.Integer(), nullable=True),
        sa.Column("updated_at", sa.DateTime(timezone=True), nullable=False),
        sa.ForeignKeyConstraint(
            ["arch", "fingerprint"], ["artifacts.arch", "artifacts.fingerprint"], name="fk_entries_arch_fingerprint"
        ),
        sa.ForeignKeyConstraint(["measurement_id"], ["measurements.id"], name="fk_entries_measurement_id"),
        sa.ForeignKeyConstraint(["problem_id"], ["problems.id"], name="fk_entries_problem_id"),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name="fk_entries_run_id"),
        sa.ForeignKeyConstraint(["runner_up_id"], ["schedules.id"], name="fk_entries_runner_up_id"),
        sa.ForeignKeyConstraint(["schedule_id"], ["schedules.id"], name="fk_entries_schedule_id"),
        sa.ForeignKeyConstraint(["toolchain_id"], ["toolchains.id"], name="fk_entries_toolchain_id"),
        sa.PrimaryKeyConstraint("id", name="pk_entries"),
        sa.UniqueConstraint(
            "kernel", "arch", "problem_id", "device_name", "regime", "accum_mode", name="uq_entries_key"
        ),
    )


def downgrade():
    for table in (
        "entries",
        "failures",
        "measurements",
        "runs",
        "builds",
        "artifacts",
        "schedules",
        "problems",
        "toolchains",
        "devices",
    ):
        op.drop_table(table)
