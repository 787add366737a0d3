//! The data-parallel size of `auto`.

use super::*;

/// The layout of a run on so many ranks.
fn layout(text: &str, ranks: usize) -> Result<String, String> {
    let file = format!("{TEXT}[parallel]\ndata-parallel = \"auto\"\n{text}");
    let config = RunConfig::parse_on("run.toml", &file, &[], &|copy| Ok(ranks.max(copy)));
    let config = config.map_err(|errors| errors.to_string())?;
    config.check().map_err(|errors| errors.to_string())?;
    Ok(config.parallel.to_string())
}

#[test]
fn auto_fills_all_ranks_and_keeps_the_global_batch() {
    let batch = "[training]\nglobal-batch = 12\n";
    for (keys, ranks, expected) in [
        ("", 4, "DP4"),
        ("", 1, "TP1"),
        ("tensor-parallel = 2\nsequence-parallel = true\n", 4, "TP2 SP DP2"),
        ("tensor-parallel = 2\n", 1, "TP2"),
        ("pipeline-parallel = 2\nzero = 1\n", 6, "PP2 DP3 ZeRO1"),
        ("zero = 3\n", 1, "ZeRO3"),
    ] {
        assert_eq!(layout(&format!("{keys}{batch}"), ranks).as_deref(), Ok(expected), "{keys}");
    }
    // What would be too many passes for one copy of the model is not for all of them.
    let many = layout("pipeline-parallel = 2\n[training]\nglobal-batch = 262144\n", 64);
    assert_eq!(many.as_deref(), Ok("PP2 DP32"));
    let given = RunConfig::parse_on("run.toml", "", &[("parallel.dp".into(), "auto".into())], &|_| Ok(3));
    // What is written down, and what processes compare, is the number.
    assert!(given.unwrap_err().to_string().contains("nearest legal numbers of ranks: 2, 4"));
    let toml = good("[training]\nglobal-batch = 12\n", &[("parallel.dp", "3")]).to_toml();
    let of_auto = RunConfig::parse_on("run.toml", batch, &[("parallel.dp".into(), "auto".into())], &|_| Ok(3));
    assert_eq!(of_auto.unwrap().to_toml(), toml);
}

#[test]
fn numbers_of_ranks_that_do_not_run_are_refused_with_the_nearest_that_do() {
    let batch = "[training]\nglobal-batch = 12\nmicro-batch = 2\n";
    for (keys, ranks, said) in [
        (
            "",
            4,
            "parallel.data-parallel = auto: of 4 ranks, `global-batch 12` is not a multiple of micro-batch 2 x data-parallel 4 \
             = 8; nearest legal global batch: 8 or 16; or keep 12 with micro-batch 1; nearest legal numbers of ranks: 3, 6",
        ),
        (
            "tensor-parallel = 2\n",
            5,
            "parallel.data-parallel = auto: of 5 ranks, they are no whole copies of a model on 2; nearest legal numbers of ranks: \
             4, 6",
        ),
        ("zero = 1\nzero-group = 2\n", 3, "zero-group 2 does not divide data-parallel 3; nearest legal: 1, 3"),
        // With no number of ranks.
        ("tensor-parallel = 3\n", 3, "tensor-parallel 3 does not divide"),
    ] {
        says!(layout(&format!("{keys}{batch}"), ranks).unwrap_err(), said);
    }
    let unknown = refusal("", &[("parallel.dp", "auto")]);
    says!(unknown, "parallel.data-parallel = auto: only train, bench of a file and plan");
}

#[test]
fn the_smallest_data_parallel_size_of_restarts_is_checked() {
    let keys = "[training]\nglobal-batch = 4\nmin-data-parallel = 2\n";
    let dp = "[parallel]\ndata-parallel = 2\n";
    let said = contradiction(&format!("{TEXT}{dp}{keys}"));
    says!(said, "training.min-data-parallel = 2 is for restarts, and training.max-restarts = 0");
    let said = contradiction(&format!("{TEXT}{keys}max-restarts = 1\n"));
    says!(said, "is above parallel.data-parallel = 1; nearest legal: 1");
    assert_eq!(good(&format!("{TEXT}{dp}{keys}max-restarts = 1\n"), &[]).check(), Ok(()));
}
