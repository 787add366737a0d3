//! CUPTI's activity API, loaded at run time: the work on the GPUs, and the calls that launched it.
//!
//! Prototypes are those of `cupti_activity.h`, the same in CUDA 12 and 13. Only tracing is used, which needs no special
//! permissions, unlike hardware counters.

use super::record::{LONGEST, OURS, Record, decode, kind};
use libloading::Library;
use parking_lot::Mutex;
use std::alloc::Layout;
use std::ffi::{CStr, c_char, c_void};
use std::path::PathBuf;
use std::sync::OnceLock;

/// `CUPTI_SUCCESS`.
const SUCCESS: u32 = 0;
/// `CUPTI_ACTIVITY_FLAG_FLUSH_FORCED`.
const FORCED: u32 = 1;
/// Size of a buffer of records, as in NVIDIA's samples.
const BUFFER: Layout = match Layout::from_size_align(8 << 20, 8) {
    Ok(layout) => layout,
    Err(_) => unreachable!(),
};

/// The recorded kinds. Operation ids are in the records of launching calls, so these are needed too.
const KINDS: [u32; 7] = [
    kind::CONCURRENT_KERNEL,
    kind::MEMCPY,
    kind::MEMCPY_PEER,
    kind::MEMSET,
    kind::DRIVER,
    kind::RUNTIME,
    kind::EXTERNAL_CORRELATION,
];

type Requested = extern "C" fn(*mut *mut u8, *mut usize, *mut usize);
type Completed = extern "C" fn(*mut c_void, u32, *mut u8, usize, usize);

/// The library's functions; it is never closed.
#[derive(Clone, Copy)]
struct Cupti {
    version: unsafe extern "C" fn(*mut u32) -> u32,
    register: unsafe extern "C" fn(Requested, Completed) -> u32,
    enable: unsafe extern "C" fn(u32) -> u32,
    disable: unsafe extern "C" fn(u32) -> u32,
    flush: unsafe extern "C" fn(u32) -> u32,
    next: unsafe extern "C" fn(*mut u8, usize, *mut *mut u8) -> u32,
    dropped: unsafe extern "C" fn(*mut c_void, u32, *mut usize) -> u32,
    push: unsafe extern "C" fn(u32, u64) -> u32,
    pop: unsafe extern "C" fn(u32, *mut u64) -> u32,
    clock: unsafe extern "C" fn(*mut u64) -> u32,
    text: unsafe extern "C" fn(u32, *mut *const c_char) -> u32,
}

static CUPTI: OnceLock<Result<Cupti, String>> = OnceLock::new();
static RECORDS: Mutex<Vec<Record>> = Mutex::new(Vec::new());
static DROPPED: Mutex<usize> = Mutex::new(0);

fn open() -> Result<Cupti, String> {
    let mut wrong = Vec::new();
    for path in candidates() {
        // SAFETY: the library's initialisers have no preconditions.
        match unsafe { Library::new(&path) } {
            Ok(library) => match functions(Box::leak(Box::new(library))) {
                Ok(found) => return Ok(found),
                Err(error) => wrong.push(format!("{}: {error}", path.display())),
            },
            Err(_) if path.components().count() == 1 => {}
            Err(error) => wrong.push(format!("{}: {error}", path.display())),
        }
    }
    let advice = "CUPTI (libcupti.so.13 or .12) is not found: install cuda-cupti-13-0 (NVIDIA's CUDA repository) or \
                  `pip install nvidia-cuda-cupti`, and put its folder into LD_LIBRARY_PATH";
    Err(if wrong.is_empty() { advice.into() } else { wrong.join("; ") })
}

/// Names for the loader, then the paths of packages and wheels.
fn candidates() -> Vec<PathBuf> {
    let names = ["libcupti.so.13", "libcupti.so.12", "libcupti.so"];
    let mut folders = crate::library::folders();
    folders.extend(["/usr/local/cuda/extras/CUPTI/lib64", "/opt/cuda/extras/CUPTI/lib64"].map(PathBuf::from));
    folders.extend(beside_loaded());
    let files = folders.iter().flat_map(|folder| names.map(|name| folder.join(name))).filter(|file| file.is_file());
    names.iter().map(PathBuf::from).chain(files).collect()
}

/// The folders of CUDA's libraries that this process has loaded, and their neighbours in wheels of CUDA 12.
fn beside_loaded() -> Vec<PathBuf> {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap_or_default();
    let paths = maps.lines().filter_map(|line| line.split_whitespace().nth(5).map(PathBuf::from));
    let is_cuda = |path: &PathBuf| path.file_name().is_some_and(|name| name.to_string_lossy().starts_with("libcublas"));
    let mut folders: Vec<PathBuf> = paths.filter(is_cuda).filter_map(|path| path.parent().map(PathBuf::from)).collect();
    folders.dedup();
    let wheels: Vec<PathBuf> = folders.iter().map(|folder| folder.join("../../cuda_cupti/lib")).collect();
    folders.extend(wheels);
    folders
}

fn functions(library: &'static Library) -> Result<Cupti, String> {
    fn find<T: Copy>(library: &Library, name: &str) -> Result<T, String> {
        // SAFETY: the types are those of the prototypes in `cupti_activity.h`, `cupti_version.h` and `cupti_result.h`.
        let symbol = unsafe { library.get::<T>(name.as_bytes()) };
        symbol.map(|symbol| *symbol).map_err(|error| error.to_string())
    }
    let cupti = Cupti {
        version: find(library, "cuptiGetVersion")?,
        register: find(library, "cuptiActivityRegisterCallbacks")?,
        enable: find(library, "cuptiActivityEnable")?,
        disable: find(library, "cuptiActivityDisable")?,
        flush: find(library, "cuptiActivityFlushAll")?,
        next: find(library, "cuptiActivityGetNextRecord")?,
        dropped: find(library, "cuptiActivityGetNumDroppedRecords")?,
        push: find(library, "cuptiActivityPushExternalCorrelationId")?,
        pop: find(library, "cuptiActivityPopExternalCorrelationId")?,
        clock: find(library, "cuptiGetTimestamp")?,
        text: find(library, "cuptiGetResultString")?,
    };
    // SAFETY: both callbacks have the library's types and live as long as the program.
    cupti.done("cuptiActivityRegisterCallbacks", unsafe { (cupti.register)(requested, completed) })?;
    Ok(cupti)
}

impl Cupti {
    fn done(&self, what: &str, status: u32) -> Result<(), String> {
        if status == SUCCESS {
            return Ok(());
        }
        let mut text = std::ptr::null();
        // SAFETY: the library writes the address of a static string.
        let known = unsafe { (self.text)(status, &mut text) } == SUCCESS && !text.is_null();
        // SAFETY: as above.
        let text = known.then(|| unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned());
        Err(format!("{what}: {} (status {status})", text.unwrap_or_default()))
    }
}

fn cupti() -> Option<&'static Cupti> {
    CUPTI.get()?.as_ref().ok()
}

/// Starts recording; returns `CUPTI_API_VERSION` of the library.
///
/// # Errors
/// Why there are no records: the library is missing, or refuses.
pub(super) fn start() -> Result<u32, String> {
    let cupti = CUPTI.get_or_init(open).as_ref().map_err(Clone::clone)?;
    let mut version = 0;
    // SAFETY: the library writes the number.
    cupti.done("cuptiGetVersion", unsafe { (cupti.version)(&mut version) })?;
    for kind in KINDS {
        // SAFETY: the callbacks are registered.
        let enabled = cupti.done(&format!("cuptiActivityEnable({kind})"), unsafe { (cupti.enable)(kind) });
        if let Err(error) = enabled {
            stop();
            return Err(error);
        }
    }
    Ok(version)
}

/// Ends recording; the records stay for [`take`].
pub(super) fn stop() {
    let Some(cupti) = cupti() else { return };
    for kind in KINDS {
        // SAFETY: has no preconditions; a kind that was not enabled does no harm.
        let _ = unsafe { (cupti.disable)(kind) };
    }
}

/// Now, on the clock of the records. 0 without CUPTI.
pub(super) fn now() -> u64 {
    let mut now = 0;
    if let Some(cupti) = cupti() {
        // SAFETY: the library writes the number.
        let _ = unsafe { (cupti.clock)(&mut now) };
    }
    now
}

/// All records since the last call, of GPUs that are idle now, and the number of lost records.
///
/// # Errors
/// If the library does not return them.
pub(super) fn take() -> Result<(Vec<Record>, usize), String> {
    let cupti = cupti().ok_or("CUPTI is not open")?;
    // SAFETY: no lock is held that a callback takes.
    cupti.done("cuptiActivityFlushAll", unsafe { (cupti.flush)(FORCED) })?;
    let records = std::mem::take(&mut *RECORDS.lock());
    Ok((records, std::mem::take(&mut *DROPPED.lock())))
}

/// Assigns all later launches of this thread to operation `id`.
pub(super) fn push(id: u64) {
    if let Some(cupti) = cupti() {
        // SAFETY: has no preconditions. Without the id a kernel is listed only by its name.
        let _ = unsafe { (cupti.push)(OURS, id) };
    }
}

/// Ends the last [`push`] of this thread.
pub(super) fn pop() {
    if let Some(cupti) = cupti() {
        let mut last = 0;
        // SAFETY: the library writes the number.
        let _ = unsafe { (cupti.pop)(OURS, &mut last) };
    }
}

/// The name of a kernel, from the address in its record.
pub(super) fn name(address: usize) -> String {
    if address == 0 {
        return "a kernel without a name".into();
    }
    // SAFETY: CUPTI keeps the names of kernels for the whole run of the program.
    unsafe { CStr::from_ptr(address as *const c_char) }.to_string_lossy().into_owned()
}

extern "C" fn requested(buffer: *mut *mut u8, size: *mut usize, most_records: *mut usize) {
    // SAFETY: CUPTI passes pointers for the three results; the layout is not empty. A null buffer drops records.
    unsafe {
        *buffer = std::alloc::alloc(BUFFER);
        *size = if (*buffer).is_null() { 0 } else { BUFFER.size() };
        *most_records = 0;
    }
}

extern "C" fn completed(context: *mut c_void, stream: u32, buffer: *mut u8, _size: usize, valid: usize) {
    if buffer.is_null() {
        return;
    }
    if let Some(cupti) = cupti() {
        let mut found = Vec::new();
        let mut record = std::ptr::null_mut();
        // SAFETY: the buffer holds `valid` bytes of records, which the library returns one by one.
        while unsafe { (cupti.next)(buffer, valid, &mut record) } == SUCCESS {
            let left = (buffer as usize + valid).saturating_sub(record as usize);
            // SAFETY: a record is within the valid bytes; no others are read.
            found.extend(decode(unsafe { std::slice::from_raw_parts(record, left.min(LONGEST)) }));
        }
        let mut lost = 0;
        // SAFETY: the library writes the number.
        if unsafe { (cupti.dropped)(context, stream, &mut lost) } == SUCCESS {
            *DROPPED.lock() += lost;
        }
        RECORDS.lock().extend(found);
    }
    // SAFETY: `requested` has allocated it with this layout, and CUPTI is done with it.
    unsafe { std::alloc::dealloc(buffer, BUFFER) };
}
