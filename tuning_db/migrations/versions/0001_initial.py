"""The schema of the first release. Earlier ones, which were never released, are not upgraded."""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

TIME = sa.DateTime(timezone=True)


def upgrade():
    op.create_table(
        "artifacts",
        sa.Column("arch", sa.String(16), nullable=False),
        sa.Column("fingerprint", sa.String(64), nullable=False),
        sa.Column("facts", sa.JSON(), nullable=True),
        sa.Column("cubin_bytes", sa.Integer(), nullable=False),
        sa.PrimaryKeyConstraint("arch", "fingerprint", name="pk_artifacts"),
    )
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
        "fleet_campaigns",
        sa.Column("id", sa.String(12), nullable=False),
        sa.Column("job", sa.String(200), nullable=False),
        sa.Column("kernel", sa.String(400), nullable=False),
        sa.Column("options", sa.JSON(), nullable=False),
        sa.Column("compiler", sa.String(64), nullable=False),
        sa.Column("source_hash", sa.String(64), nullable=False),
        sa.Column("lease_s", sa.Float(), nullable=False),
        sa.Column("deadline_s", sa.Float(), nullable=False),
        sa.Column("most_attempts", sa.Integer(), nullable=False),
        sa.Column("status", sa.String(16), nullable=False),
        sa.Column("created_at", TIME, nullable=False),
        sa.Column("ends_at", TIME, nullable=True),
        sa.Column("finished_at", TIME, nullable=True),
        sa.PrimaryKeyConstraint("id", name="pk_fleet_campaigns"),
    )
    op.create_table(
        "kernel_views",
        sa.Column("name", sa.String(63), nullable=False),
        sa.Column("kernel", sa.String(200), nullable=False),
        sa.Column("definition", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("name", name="pk_kernel_views"),
        sa.UniqueConstraint("kernel", name="uq_kernel_views_kernel"),
    )
    op.create_table(
        "problems",
        sa.Column("id", sa.String(12), nullable=False),
        sa.Column("kernel", sa.String(200), nullable=False),
        sa.Column("dims", sa.JSON(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_problems"),
    )
    op.create_index("ix_problems_kernel", "problems", ["kernel"])
    op.create_table(
        "runs",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("status", sa.String(16), nullable=False),
        sa.Column("command", sa.JSON(), nullable=False),
        sa.Column("arch", sa.String(16), nullable=False),
        sa.Column("hostname", sa.String(255), nullable=False),
        sa.Column("pid", sa.Integer(), nullable=False),
        sa.Column("host", sa.JSON(), nullable=False),
        sa.Column("started_at", TIME, nullable=False),
        sa.Column("finished_at", TIME, nullable=True),
        sa.PrimaryKeyConstraint("id", name="pk_runs"),
    )
    op.create_index("ix_runs_status", "runs", ["status"])
    op.create_table(
        "schedules",
        sa.Column("id", sa.String(12), nullable=False),
        sa.Column("knobs", sa.JSON(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_schedules"),
    )
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
        "builds",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("kernel", sa.String(200), nullable=False),
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
        sa.Column("created_at", TIME, nullable=False),
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
        "failures",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("run_id", sa.Integer(), nullable=True),
        sa.Column("kernel", sa.String(200), nullable=False),
        sa.Column("arch", sa.String(16), nullable=False),
        sa.Column("stage", sa.String(16), nullable=False),
        sa.Column("problem_id", sa.String(12), nullable=True),
        sa.Column("schedule_id", sa.String(12), nullable=False),
        sa.Column("fingerprint", sa.String(64), nullable=True),
        sa.Column("device_id", sa.String(12), nullable=True),
        sa.Column("kind", sa.String(32), nullable=False),
        sa.Column("message", sa.Text(), nullable=False),
        sa.Column("created_at", TIME, nullable=False),
        sa.ForeignKeyConstraint(["device_id"], ["devices.id"], name="fk_failures_device_id"),
        sa.ForeignKeyConstraint(["problem_id"], ["problems.id"], name="fk_failures_problem_id"),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name="fk_failures_run_id"),
        sa.ForeignKeyConstraint(["schedule_id"], ["schedules.id"], name="fk_failures_schedule_id"),
        sa.PrimaryKeyConstraint("id", name="pk_failures"),
    )
    op.create_index("ix_failures_arch", "failures", ["arch"])
    op.create_index("ix_failures_problem_id", "failures", ["problem_id"])
    op.create_table(
        "fleet_workers",
        sa.Column("id", sa.String(12), nullable=False),
        sa.Column("campaign_id", sa.String(12), nullable=False),
        sa.Column("hostname", sa.String(255), nullable=False),
        sa.Column("pid", sa.Integer(), nullable=False),
        sa.Column("gpu", sa.String(64), nullable=False),
        sa.Column("device_name", sa.String(128), nullable=False),
        sa.Column("arch", sa.String(16), nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("note", sa.Text(), nullable=False),
        sa.Column("conditions", sa.JSON(), nullable=False),
        sa.Column("started_at", TIME, nullable=False),
        sa.Column("seen_at", TIME, nullable=False),
        sa.ForeignKeyConstraint(["campaign_id"], ["fleet_campaigns.id"], name="fk_fleet_workers_campaign_id"),
        sa.PrimaryKeyConstraint("id", name="pk_fleet_workers"),
    )
    op.create_index("ix_fleet_workers_campaign_id", "fleet_workers", ["campaign_id"])
    op.create_table(
        "measurements",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("uid", sa.String(24), nullable=False),
        sa.Column("run_id", sa.Integer(), nullable=True),
        sa.Column("kernel", sa.String(200), nullable=False),
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
        sa.Column("created_at", TIME, nullable=False),
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
        "entries",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("kernel", sa.String(200), nullable=False),
        sa.Column("arch", sa.String(16), nullable=False),
        sa.Column("problem_id", sa.String(12), nullable=False),
        sa.Column("device_name", sa.String(128), nullable=False),
        sa.Column("regime", sa.String(16), nullable=False),
        sa.Column("accum_mode", sa.String(16), nullable=False),
        sa.Column("compiler", sa.String(64), nullable=False),
        sa.Column("provenance", sa.String(16), nullable=False),
        sa.Column("schedule_id", sa.String(12), nullable=False),
        sa.Column("fingerprint", sa.String(64), nullable=True),
        sa.Column("measurement_id", sa.Integer(), nullable=True),
        sa.Column("model_us", sa.Float(), nullable=True),
        sa.Column("runner_up_id", sa.String(12), nullable=True),
        sa.Column("margin", sa.Float(), nullable=True),
        sa.Column("ties", sa.JSON(), nullable=False),
        sa.Column("rivals", sa.JSON(), nullable=True),
        sa.Column("candidates", sa.Integer(), nullable=False),
        sa.Column("source", sa.Text(), nullable=False),
        sa.Column("toolchain_id", sa.String(12), nullable=True),
        sa.Column("source_hash", sa.String(64), nullable=False),
        sa.Column("run_id", sa.Integer(), nullable=True),
        sa.Column("updated_at", TIME, nullable=False),
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
            "kernel", "arch", "problem_id", "device_name", "regime", "accum_mode", "compiler", name="uq_entries_key"
        ),
    )
    op.create_table(
        "fleet_controls",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("campaign_id", sa.String(12), nullable=False),
        sa.Column("worker_id", sa.String(12), nullable=False),
        sa.Column("gpu", sa.String(64), nullable=False),
        sa.Column("arch", sa.String(16), nullable=False),
        sa.Column("fingerprint", sa.String(64), nullable=False),
        sa.Column("median_us", sa.Float(), nullable=False),
        sa.Column("ci_low_us", sa.Float(), nullable=False),
        sa.Column("ci_high_us", sa.Float(), nullable=False),
        sa.Column("conditions", sa.JSON(), nullable=False),
        sa.Column("taken_at", TIME, nullable=False),
        sa.ForeignKeyConstraint(["campaign_id"], ["fleet_campaigns.id"], name="fk_fleet_controls_campaign_id"),
        sa.ForeignKeyConstraint(["worker_id"], ["fleet_workers.id"], name="fk_fleet_controls_worker_id"),
        sa.PrimaryKeyConstraint("id", name="pk_fleet_controls"),
    )
    op.create_index("ix_fleet_controls_campaign_id", "fleet_controls", ["campaign_id"])
    op.create_table(
        "fleet_leases",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("campaign_id", sa.String(12), nullable=False),
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column("arch", sa.String(16), nullable=False),
        sa.Column("problem_id", sa.String(12), nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("attempts", sa.Integer(), nullable=False),
        sa.Column("worker_id", sa.String(12), nullable=True),
        sa.Column("until", TIME, nullable=True),
        sa.Column("result", sa.JSON(), nullable=True),
        sa.Column("message", sa.Text(), nullable=False),
        sa.Column("done_at", TIME, nullable=True),
        sa.ForeignKeyConstraint(["campaign_id"], ["fleet_campaigns.id"], name="fk_fleet_leases_campaign_id"),
        sa.ForeignKeyConstraint(["problem_id"], ["problems.id"], name="fk_fleet_leases_problem_id"),
        sa.ForeignKeyConstraint(["worker_id"], ["fleet_workers.id"], name="fk_fleet_leases_worker_id"),
        sa.PrimaryKeyConstraint("id", name="pk_fleet_leases"),
        sa.UniqueConstraint("campaign_id", "arch", "problem_id", name="uq_fleet_leases_key"),
    )
    op.create_index("ix_fleet_leases_next", "fleet_leases", ["campaign_id", "state", "arch", "attempts", "number"])
    op.create_index("ix_fleet_leases_worker_id", "fleet_leases", ["worker_id"])
    op.create_table(
        "fleet_attempts",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("lease_id", sa.Integer(), nullable=False),
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column("worker_id", sa.String(12), nullable=False),
        sa.Column("started_at", TIME, nullable=False),
        sa.Column("ended_at", TIME, nullable=True),
        sa.Column("outcome", sa.String(16), nullable=False),
        sa.Column("message", sa.Text(), nullable=False),
        sa.Column("result", sa.JSON(), nullable=True),
        sa.ForeignKeyConstraint(["lease_id"], ["fleet_leases.id"], name="fk_fleet_attempts_lease_id"),
        sa.ForeignKeyConstraint(["worker_id"], ["fleet_workers.id"], name="fk_fleet_attempts_worker_id"),
        sa.PrimaryKeyConstraint("id", name="pk_fleet_attempts"),
    )
    op.create_index("ix_fleet_attempts_lease_id", "fleet_attempts", ["lease_id"])
    op.create_index("ix_fleet_attempts_worker_id", "fleet_attempts", ["worker_id"])
