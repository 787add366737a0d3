//! No value in a `config.json`, or in the model of a checkpoint, panics, takes long or allocates much: it is read, or
//! refused by name.

use parking_lot::Mutex;
use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use models::{FamilyConfig, ModelConfig};
use proptest::prelude::*;
use serde_json::{Value, json};

struct Counting;

static LIVE: AtomicUsize = AtomicUsize::new(0);
static PEAK: AtomicUsize = AtomicUsize::new(0);

// SAFETY: forwards to the system's allocator and only counts.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let live = LIVE.fetch_add(layout.size(), Ordering::Relaxed) + layout.size();
        PEAK.fetch_max(live, Ordering::Relaxed);
        // SAFETY: the caller's promises are passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, block: *mut u8, layout: Layout) {
        LIVE.fetch_sub(layout.size(), Ordering::Relaxed);
        // SAFETY: as above.
        unsafe { System.dealloc(block, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// The allocator counts the whole process: one test at a time.
static ALONE: Mutex<()> = Mutex::new(());

/// The most that one configuration may allocate: the names of the tensors of a model at the limits.
const MOST_BYTES: usize = 1 << 30;
/// One core of a busy machine, without optimisation.
const MOST_TIME: Duration = Duration::from_secs(20);

macro_rules! hf {
    ($($folder:literal)*) => {
        [$(include_str!(concat!("../../tests/golden/hf/", $folder, "/config.json"))),*]
    };
}

const FILES: [&str; 27] = hf![
    "llama2" "llama3" "mistral" "qwen3" "mixtral" "qwen3_moe" "gpt2" "deepseek_v3" "qwen2" "smollm3" "olmo2" "gemma2"
    "gemma3" "phi3" "glm4" "gpt_oss" "mamba2" "nemotron_h" "nemotron3" "gemma" "olmo3" "olmoe" "granite" "seed_oss"
    "ernie4_5" "deepseek" "deepseek_v2"
];

fn values() -> Vec<Value> {
    let numbers = [0, 1, 2, 3, 1 << 12, 1 << 16, 1 << 20, 1 << 31, 1 << 32, (1 << 63) - 1, u64::MAX];
    let others = [
        json!(-1),
        json!(i64::MIN),
        json!(0.5),
        json!(-0.0),
        json!(1e308),
        json!(-1e308),
        json!(5e-324),
        json!("NaN"),
        json!("1e999"),
        json!(""),
        json!(null),
        json!(true),
        json!([]),
        json!([u64::MAX]),
        json!(vec![1; 5000]),
        json!({}),
    ];
    numbers.into_iter().map(|number| json!(number)).chain(others).collect()
}

/// Everything that follows from a configuration without tensors.
fn follow(config: &FamilyConfig) {
    let names = config.hf_names();
    assert!(names.iter().count() > 0 && config.parameter_count() > 0, "{config:?}");
    assert!(config.megatron_names().iter().count() > 0);
    let dims = config.dims();
    assert!(dims.check_tp(1).is_ok() && dims.layers > 0, "{config:?}");
    // What transformers takes as a whole number only may be another one here.
    if let Err(error) = config.to_hf() {
        assert!(error.to_string().contains("`query_pre_attn_scalar`"), "{error}");
    }
}

/// Reads a file and, if it is legal, all that follows from it; whether it is legal.
fn read(file: &Value) -> bool {
    bounded(file, || FamilyConfig::from_hf(file).map_err(|error| error.to_string()))
}

/// The same for the model that a checkpoint's manifest names.
fn read_saved(model: &Value) -> bool {
    bounded(model, || {
        let config: FamilyConfig = serde_json::from_value(model.clone()).map_err(|error| error.to_string())?;
        config.check().map_err(|error| error.to_string())?;
        Ok(config)
    })
}

fn bounded(file: &Value, read: impl FnOnce() -> Result<FamilyConfig, String>) -> bool {
    let before = LIVE.load(Ordering::Relaxed);
    PEAK.store(before, Ordering::Relaxed);
    let start = Instant::now();
    let config = read();
    match &config {
        Ok(config) => follow(config),
        Err(message) => assert!(!message.is_empty() && message.len() < 20_000, "{message}"),
    }
    let (time, bytes) = (start.elapsed(), PEAK.load(Ordering::Relaxed).saturating_sub(before));
    assert!(time < MOST_TIME && bytes < MOST_BYTES, "{time:?}, {bytes} bytes: {file}");
    config.is_ok()
}

/// The files, and the same file with each number, also inside of objects, replaced by each value.
fn sweep(file: &Value, read: impl Fn(&Value) -> bool) -> [usize; 2] {
    assert!(read(file), "{file}");
    let mut counts = [0, 0];
    let mut places: Vec<String> = Vec::new();
    for (key, value) in file.as_object().unwrap() {
        match value {
            Value::Object(inner) => places.extend(inner.keys().map(|inner| format!("/{key}/{inner}"))),
            _ => places.push(format!("/{key}")),
        }
    }
    for place in places {
        for value in values() {
            let mut changed = file.clone();
            *changed.pointer_mut(&place).unwrap() = value;
            counts[usize::from(read(&changed))] += 1;
        }
    }
    counts
}

#[test]
fn any_value_of_any_key_is_read_or_refused_at_once() {
    let _alone = ALONE.lock();
    for text in FILES {
        let file: Value = serde_json::from_str(text).unwrap();
        let [refused, legal] = sweep(&file, read);
        assert!(refused > 200 && legal > 50, "{refused} {legal}: {file}");
        let config = FamilyConfig::from_hf(&file).unwrap();
        let [refused, legal] = sweep(&serde_json::to_value(config).unwrap(), read_saved);
        assert!(refused > 200 && legal > 50, "{refused} {legal}: {file}");
    }
}

/// A file whose sizes are refused names one of them, its value and the largest legal one.
#[test]
fn sizes_are_refused_by_name() {
    let _alone = ALONE.lock();
    for (text, key) in [
        (FILES[0], "num_hidden_layers"),
        (FILES[4], "num_local_experts"),
        (FILES[6], "n_layer"),
        (FILES[6], "n_head"),
        (FILES[7], "n_routed_experts"),
        (FILES[7], "num_attention_heads"),
        (FILES[7], "num_nextn_predict_layers"),
    ] {
        let mut file: Value = serde_json::from_str(text).unwrap();
        file[key] = json!(1u64 << 31);
        let message = FamilyConfig::from_hf(&file).unwrap_err().to_string();
        assert!(
            message.contains(&format!("`{key}` is 2147483648, more than this program can hold; nearest")),
            "{message}"
        );
    }
}

/// As many cases as the environment says; few without.
fn cases() -> u32 {
    std::env::var("BURN_MEGATRON_FUZZ_CASES").ok().and_then(|cases| cases.parse().ok()).unwrap_or(200)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: cases(), failure_persistence: None, ..ProptestConfig::default() })]
    #[test]
    fn any_config_json_is_read_or_refused_at_once(
        file in 0usize..FILES.len(),
        changes in prop::collection::vec((any::<prop::sample::Index>(), change()), 0..6),
    ) {
        let _alone = ALONE.lock();
        let mut file: Value = serde_json::from_str(FILES[file]).unwrap();
        for (key, change) in changes {
            let fields = file.as_object_mut().unwrap();
            let key = key.get(&fields.keys().cloned().collect::<Vec<_>>()).clone();
            match change {
                Some(value) => drop(fields.insert(key, value)),
                None if fields.len() > 1 => drop(fields.remove(&key)),
                None => {}
            }
        }
        read(&file);
    }

    #[test]
    fn any_damaged_text_is_read_or_refused_at_once(
        file in 0usize..FILES.len(),
        damage in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..4),
    ) {
        let _alone = ALONE.lock();
        let mut bytes = FILES[file].as_bytes().to_vec();
        for (at, byte) in damage {
            let at = at.index(bytes.len());
            bytes[at] = byte;
        }
        if let Ok(file) = serde_json::from_slice::<Value>(&bytes) {
            read(&file);
        }
    }
}

/// Another value of a key, or none.
fn change() -> impl Strategy<Value = Option<Value>> {
    let number =
        (0u32..64, 0u64..3).prop_map(|(power, more)| json!((1u64 << power).wrapping_add(more).wrapping_sub(1)));
    let edge = prop::sample::select(values());
    prop_oneof![3 => number.prop_map(Some), 3 => any::<f64>().prop_map(|x| Some(json!(x))), 3 => edge.prop_map(Some), 1 => Just(None)]
}
