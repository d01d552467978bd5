"""A folder of traces as the benches expect one, small enough for a test."""

from __future__ import annotations

from pathlib import Path

HEADER = "job_id,submit_time,iteration,model_name,ddl,batch_size,num_gpu,duration,best_effort"


def write_trace(folder: Path, name: str, num_jobs: int = 6, *, best_effort: int = 0) -> Path:
    """Jobs of ten minutes a minute apart, the last `best_effort` of them without a deadline."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = [
        f"{index},{60 * index},6000,toy,{60 * index + 400 + 300 * (index % 3)},32,1,600,"
        f"{int(index >= num_jobs - best_effort)}"
        for index in range(num_jobs)
    ]
    path = folder / f"{name}.csv"
    path.write_text("\n".join([HEADER, *rows]) + "\n")
    return path


def write_folder(root: Path) -> Path:
    """Traces of three figures, scaling tables, and what others reached."""
    write_trace(root / "traces", "195job")
    write_trace(root / "generated", "gen_fig9_1000jobs_lam1500", 8)
    write_trace(root / "generated", "gen_fig10_100jobs_lam1500", 4)
    write_trace(root / "generated", "gen_fig11_200jobs_lam900_be0.5", 8, best_effort=4)
    write_trace(root / "traces", "somewhere", 3)
    (root / "throughputs_A100").mkdir()
    (root / "throughputs_A100" / "toy.csv").write_text("global_batch_size,1,2,4,8\n32,10,19,35,60\n")
    (root / "artifact_results.csv").write_text(
        "exp,trace,cluster,policy,met_by_artifact,ratio_by_artifact,makespan_h,avg_jct_s_best_effort\n"
        "fig6b,195job,n16g8(128),ef-accessctrl,3,0.5,1.5,\n"
        "inst,195job,n16g8(128),ef-accessctrl [fig6b_nopoison],5,0.8333,1.6,\n"
        "fig6b,195job,n16g8(128),dlas-gpu,2,0.3333,2.5,\n"
        "fig6b,195job,n16g8(128),themis,,,,\n"
    )
    (root / "published_results.csv").write_text(
        "figure,trace_or_setting,policy,deadline_satisfactory_ratio\n"
        "6b,195job testbed,edf,0.0872\n6b,195job testbed,tiresias,0.4564\n"
        "9,64 GPUs,edf,0.026\n9,64 GPUs,edf+elastic(ef),0.452\n11,be 0.5,edf,0.23\n8b,philly,edf,0.01\n"
    )
    (root / "upper_bounds.csv").write_text("trace,gpus,offline_LP_upper_bound_jobs\n195job,128,6\n")
    return root
