use super::*;

fn read(variables: &str) -> Result<Option<ProcessWorld>, String> {
    let pairs = variables.split_whitespace().map(|pair| pair.split_once('=').unwrap());
    let variables = pairs.map(|(name, value)| (name.to_string(), value.to_string())).collect();
    ProcessWorld::from_variables(&variables).map_err(|error| error.to_string())
}

const TORCHRUN: &str = "RANK=5 WORLD_SIZE=8 LOCAL_RANK=1 LOCAL_WORLD_SIZE=4 MASTER_ADDR=node0 MASTER_PORT=29500";

#[test]
fn a_process_that_is_alone_has_no_world() {
    for variables in ["", "MASTER_ADDR=a MASTER_PORT=1", "RANK=0 WORLD_SIZE=1", "SLURM_PROCID=3 SLURM_NTASKS=4"] {
        assert_eq!(read(variables), Ok(None), "{variables}");
    }
}

#[test]
fn torchrun_and_srun_describe_the_same_world() {
    let world = read(TORCHRUN).unwrap().unwrap();
    assert_eq!((world.process, world.processes, world.local), (5, 8, 1));
    assert_eq!((world.address.as_str(), world.port, world.patience), ("node0", 29500, PATIENCE));
    assert!(!world.one_host && world.run.is_empty());
    let slurm =
        "SLURM_STEP_NUM_NODES=2 SLURM_PROCID=5 SLURM_NTASKS=8 SLURM_LOCALID=1 MASTER_ADDR=node0 MASTER_PORT=29500";
    assert_eq!(read(slurm).unwrap().unwrap(), world);
    let mpirun = "OMPI_COMM_WORLD_LOCAL_SIZE=4 OMPI_COMM_WORLD_RANK=5 OMPI_COMM_WORLD_SIZE=8 OMPI_COMM_WORLD_LOCAL_RANK=1 MASTER_ADDR=node0 MASTER_PORT=29500";
    assert_eq!(read(mpirun).unwrap().unwrap(), world);
    assert_eq!(read(&format!("{mpirun} SLURM_PROCID=0 SLURM_NTASKS=2 SLURM_LOCALID=0")).unwrap().unwrap(), world);
    assert_eq!((world.share(16), world.share(8), world.share(4), world.share(12)), (Some(2), Some(1), None, None));
}

#[test]
fn launchers_name_the_run_and_say_whether_it_has_one_host() {
    let world = |more: &str| read(&format!("{TORCHRUN} {more}")).unwrap().unwrap();
    assert_eq!(world("TORCHELASTIC_RUN_ID=a SLURM_JOB_ID=7").run, "TORCHELASTIC_RUN_ID=a SLURM_JOB_ID=7");
    let one_host = |variables: &str| read(variables).unwrap().unwrap().one_host;
    let on_host = |variables: &str| read(variables).unwrap().unwrap().on_host;
    assert!(one_host(&TORCHRUN.replace("LOCAL_WORLD_SIZE=4", "LOCAL_WORLD_SIZE=8")));
    let slurm = "SLURM_PROCID=5 SLURM_NTASKS=8 SLURM_LOCALID=1 MASTER_ADDR=node0 MASTER_PORT=29500";
    assert!(one_host(slurm) && one_host(&format!("{slurm} SLURM_NNODES=1")));
    assert!(!one_host(&format!("{slurm} SLURM_NNODES=2")));
    assert_eq!((on_host(TORCHRUN), on_host(slurm), on_host(&format!("{slurm} SLURM_NNODES=2"))), (4, 8, 4));
}

#[test]
fn processes_that_cannot_find_each_other_are_refused() {
    let said = |variables: &str| read(variables).unwrap_err();
    let srun = said("SLURM_PROCID=1 SLURM_NTASKS=2 SLURM_LOCALID=1 SLURM_STEP_NUM_TASKS=2");
    assert!(srun.starts_with("SLURM_STEP_NUM_TASKS = \"2\": expected 1, or MASTER_ADDR and MASTER_PORT"), "{srun}");
    assert!(said("OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_SIZE=4").starts_with("OMPI_COMM_WORLD_SIZE = \"4\""));
    assert_eq!(read("SLURM_PROCID=0 SLURM_NTASKS=8 SLURM_STEP_NUM_TASKS=1"), Ok(None), "one task of a larger job");
}

#[test]
fn the_port_is_one_that_torchruns_agent_does_not_hold() {
    let port = |more: &str| read(&format!("{TORCHRUN} {more}")).map(|world| world.unwrap().port);
    assert_eq!(port("TORCHELASTIC_USE_AGENT_STORE=True"), Ok(29501));
    assert_eq!(port("TORCHELASTIC_USE_AGENT_STORE=False"), Ok(29500));
    assert_eq!(port("TORCHELASTIC_USE_AGENT_STORE=True BURN_MEGATRON_PORT=7000"), Ok(7000));
    assert!(port("BURN_MEGATRON_PORT=70000").unwrap_err().starts_with("BURN_MEGATRON_PORT = \"70000\": expected"));
}

#[test]
fn what_is_wrong_is_named_with_what_would_do() {
    for (from, to, words) in [
        ("RANK=5", "", "RANK is not set: expected a process of WORLD_SIZE = 8, so 0 to 7"),
        ("RANK=5", "RANK=8", "RANK = \"8\": expected a process of WORLD_SIZE = 8, so 0 to 7"),
        ("WORLD_SIZE=8 ", "WORLD_SIZE=no ", "WORLD_SIZE = \"no\": expected the number of processes"),
        ("WORLD_SIZE=8 ", "WORLD_SIZE=0 ", "WORLD_SIZE = \"0\""),
        (" LOCAL_RANK=1", "", "LOCAL_RANK is not set: expected the number of this process among the 4 of its host"),
        ("LOCAL_RANK=1", "LOCAL_RANK=4", "LOCAL_RANK = \"4\""),
        ("LOCAL_WORLD_SIZE=4", "LOCAL_WORLD_SIZE=9", "LOCAL_WORLD_SIZE = \"9\": expected the number of processes of"),
        ("MASTER_ADDR=node0", "", "MASTER_ADDR is not set"),
        ("MASTER_PORT=29500", "", "MASTER_PORT is not set: expected a free port"),
        ("MASTER_PORT=29500", "MASTER_PORT=29500 BURN_MEGATRON_TIMEOUT=0", "BURN_MEGATRON_TIMEOUT = \"0\""),
        (
            "MASTER_PORT=29500",
            "MASTER_PORT=29500 BURN_MEGATRON_TIMEOUT=18446744073709551615",
            "BURN_MEGATRON_TIMEOUT = \"18446744073709551615\": expected a number of seconds, 1 to 604800 (a week)",
        ),
        ("MASTER_PORT=29500", "MASTER_PORT=29500 BURN_MEGATRON_TIMEOUT=604801", "BURN_MEGATRON_TIMEOUT = \"604801\""),
    ] {
        // `LOCAL_WORLD_SIZE=8` does not occur, so the first match is the one that is meant.
        let error = read(&TORCHRUN.replacen(from, to, 1)).unwrap_err();
        assert!(error.starts_with(words), "{error}");
    }
}
