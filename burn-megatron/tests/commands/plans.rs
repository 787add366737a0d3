//! What `plan` says where nothing fits.

use super::{command, fail, succeed};

#[test]
fn plans_name_the_nearest_layout_where_none_is_legal() {
    let folder = tempfile::tempdir().unwrap();
    let keys = "[data]\ntext = [\"book.txt\"]\n[training]\nseq-length = 16\nglobal-batch = 8\n";
    std::fs::write(folder.path().join("run.toml"), keys).unwrap();
    let plan = |flags: &str| command::succeed(folder.path(), &format!("plan run.toml --gpus {flags}"));
    says!(
        plan("3"),
        "no layout of 3 GPUs divides layers, heads, sequences and a global batch of 8; nearest legal: --gpus 2, --gpus 4\n"
    );
    for gpus in ["2", "4"] {
        says!(plan(gpus), "fastest of ");
    }
    // What `train` would refuse; nobody is asked.
    let storage = |url: &str| format!("plan run.toml --checkpoint.storage {url}");
    says!(
        command::fail(folder.path(), &storage("ftp://host/x")),
        "checkpoint.storage ftp://host/x: there is no scheme ftp; known are file, s3, gs, az"
    );
    says!(command::fail(folder.path(), &storage("copies")), "is neither a URL nor an absolute path");
    command::succeed(folder.path(), &storage("s3://bucket/run"));
    let fp8 = |flags: &str| command::fail(folder.path(), &format!("plan run.toml --fp8.format e4m3 {flags}"));
    says!(fp8("--training.dtype bf16 --gpu a100-80gb"), "a100-80gb has compute capability 8.0", "leave fp8.format out");
    says!(
        fp8("--training.dtype bf16 --gpu b200 --fp8.recipe blockwise"),
        "fp8.recipe = blockwise: b200 has compute capability 10.0",
        "nearest legal: fp8.recipe = tensorwise"
    );
    says!(fp8("--training.dtype f32"), "nearest legal: training.dtype = bf16");
}

#[test]
fn plans_of_modules_name_the_nearest_tensor_parallel_size() {
    for (kind, nearest) in [("bert", "4, 8"), ("t5", "4, 8"), ("vit", "4")] {
        let plan = format!("plan --hf {}/../tests/golden/hf/{kind}", env!("CARGO_MANIFEST_DIR"));
        let length = if kind == "vit" { "" } else { "--seq-length 64" };
        let said = fail(&format!("{plan} --tensor-parallel 5 {length}"));
        says!(said, "error: tensor-parallel 5: ", &format!("; nearest legal: {nearest}"));
    }
}

#[test]
fn sizes_of_a_module_that_cannot_be_counted_are_refused() {
    let vit = format!("plan --hf {}/../tests/golden/hf/vit", env!("CARGO_MANIFEST_DIR"));
    let said = fail(&format!("{vit} --micro-batch 18446744073709551615"));
    says!(said, "micro-batch 18446744073709551615 is more than can be planned; nearest legal: 4194304");
    succeed(&format!("{vit} --micro-batch 4194304"));
    says!(fail(&format!("{vit} --seq-length 16")), "--seq-length has no meaning with vit; nearest legal: without it");
    let t5 = vit.replace("/vit", "/t5");
    says!(fail(&format!("{t5} --num-labels 2")), "--num-labels has no meaning with t5; nearest legal: without it");
    says!(
        fail(&format!("{t5} --seq-length 2000000")),
        "seq-length 2000000 is more than can be planned; nearest legal: 1048576"
    );
}
