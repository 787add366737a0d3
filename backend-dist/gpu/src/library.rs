//! The shared libraries and the file that a GPU run loads, and what to install if one is missing.

use super::GpuError;
use std::fmt;
use std::path::{Path, PathBuf};

/// A library that is loaded at run time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Library {
    /// The CUDA driver.
    Driver,
    /// Collectives between GPUs.
    Nccl,
    /// GEMMs.
    CublasLt,
    /// Not a shared library: the bitcode of exp, log, tanh and others, linked into kernels when they are compiled.
    Libdevice,
}

impl Library {
    /// The file name that the loader searches for.
    pub fn file(self) -> &'static str {
        match self {
            Library::Driver => "libcuda.so.1",
            Library::Nccl => "libnccl.so",
            Library::CublasLt => "libcublasLt.so",
            Library::Libdevice => "libdevice.10.bc",
        }
    }

    /// How to install it.
    fn package(self) -> &'static str {
        match self {
            Library::Driver => {
                "install the NVIDIA driver (Debian: nvidia-driver, Ubuntu: nvidia-driver-580-server); \
                 in a container, start it with the NVIDIA container toolkit (`--gpus all`)"
            }
            Library::Nccl => {
                "install libnccl-dev (NVIDIA's CUDA repository for Debian and Ubuntu) or `pip install nvidia-nccl-cu13`"
            }
            Library::CublasLt => {
                "install libcublas-dev-13-0 (NVIDIA's CUDA repository for Debian and Ubuntu) or `pip install nvidia-cublas`"
            }
            Library::Libdevice => {
                "install cuda-nvvm-13-0 or cuda-nvcc-12-8 (NVIDIA's CUDA repository for Debian and Ubuntu) or \
                 `pip install nvidia-cuda-nvcc`, and set CUDA_PATH to the folder that holds nvvm/libdevice"
            }
        }
    }

    /// The error for a missing library; names a similar file in `folders`, if there is one.
    #[cfg(any(feature = "cuda", test))]
    pub(super) fn missing(self, folders: &[PathBuf]) -> GpuError {
        let stem = self.file().split(".so").next().unwrap_or(self.file());
        let found = folders.iter().find_map(|folder| file_of(folder, stem));
        let advice = match (self, found) {
            (Library::Driver, _) | (_, None) => self.package().to_string(),
            (_, Some(found)) => {
                let folder = found.parent().unwrap_or(Path::new("/")).display().to_string();
                let file = found.file_name().unwrap_or_default().to_string_lossy().into_owned();
                match file == self.file() {
                    true => format!(
                        "{} is there, but its folder is not searched: add {folder} to LD_LIBRARY_PATH",
                        found.display()
                    ),
                    false => format!(
                        "{} is there, but under that name it is not found: `ln -s {file} {folder}/{}`, with {folder} in LD_LIBRARY_PATH",
                        found.display(),
                        self.file()
                    ),
                }
            }
        };
        GpuError::Library { library: self, advice }
    }
}

impl fmt::Display for Library {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = match self {
            Library::Driver => "the NVIDIA driver",
            Library::Nccl => "NCCL",
            Library::CublasLt => "cuBLASLt",
            Library::Libdevice => "CUDA's libdevice",
        };
        write!(f, "{name} ({})", self.file())
    }
}

/// The file of `folder` that begins with `stem.so`, with the shortest name, which is the one that the loader searches
/// for.
#[cfg(any(feature = "cuda", test))]
fn file_of(folder: &Path, stem: &str) -> Option<PathBuf> {
    let names = std::fs::read_dir(folder).ok()?.flatten().map(|entry| entry.path());
    let is_it =
        |path: &PathBuf| path.file_name().is_some_and(|name| name.to_string_lossy().starts_with(&format!("{stem}.so")));
    names.filter(is_it).min_by_key(|path| (path.as_os_str().len(), path.clone()))
}

/// Folders where packages and wheels put CUDA's libraries.
#[cfg(feature = "cuda")]
pub(crate) fn folders() -> Vec<PathBuf> {
    let listed = std::env::var_os("LD_LIBRARY_PATH").unwrap_or_default();
    let mut folders: Vec<PathBuf> =
        std::env::split_paths(&listed).filter(|path| !path.as_os_str().is_empty()).collect();
    folders.extend(
        ["/usr/lib/x86_64-linux-gnu", "/usr/lib64", "/usr/local/cuda/lib64", "/usr/lib/aarch64-linux-gnu"]
            .map(PathBuf::from),
    );
    let set = |name: &str| std::env::var_os(name).map(PathBuf::from);
    let local = set("HOME").map(|home| home.join(".local"));
    let roots = [set("VIRTUAL_ENV"), set("CONDA_PREFIX"), local, Some("/usr/local".into()), Some("/usr".into())];
    folders.extend(roots.into_iter().flatten().flat_map(|root| wheels(&root)));
    folders
}

/// The folders `lib/python*/{site,dist}-packages/nvidia/*/lib` under `root`.
#[cfg(any(feature = "cuda", test))]
fn wheels(root: &Path) -> Vec<PathBuf> {
    let inside = |folder: PathBuf| -> Vec<PathBuf> {
        std::fs::read_dir(folder).map(|list| list.flatten().map(|entry| entry.path()).collect()).unwrap_or_default()
    };
    let pythons = inside(root.join("lib")).into_iter();
    let packages =
        pythons.flat_map(|python| ["site-packages", "dist-packages"].map(|name| python.join(name).join("nvidia")));
    packages.flat_map(inside).map(|package| package.join("lib")).filter(|folder| folder.is_dir()).collect()
}

/// Where CubeCL's compiler searches for libdevice, in this order (cubecl-llvm 0.12, src/nvptx/libdevice.rs).
const TOOLKITS: [&str; 4] = ["/usr/local/cuda", "/opt/cuda", "/usr/lib/cuda", "/usr"];

/// The file of CubeCL's mathematical functions. If `CUDA_PATH` is set, only that folder is searched.
///
/// # Errors
/// If the file is missing: kernels with exp, log or tanh cannot be compiled then.
pub fn libdevice() -> Result<PathBuf, GpuError> {
    libdevice_in(std::env::var_os("CUDA_PATH").map(PathBuf::from), &TOOLKITS.map(PathBuf::from))
}

fn libdevice_in(set: Option<PathBuf>, toolkits: &[PathBuf]) -> Result<PathBuf, GpuError> {
    let file = |root: &Path| root.join("nvvm/libdevice/libdevice.10.bc");
    let folder = |root: &&PathBuf| root.join("nvvm/libdevice").is_dir();
    let root = set.clone().or_else(|| toolkits.iter().find(folder).cloned());
    if let Some(path) = root.as_deref().map(file).filter(|path| path.is_file()) {
        return Ok(path);
    }
    let advice = match set {
        Some(root) => format!(
            "CUDA_PATH is {}, which has no nvvm/libdevice/libdevice.10.bc: point it at a CUDA toolkit, or {}",
            root.display(),
            Library::Libdevice.package()
        ),
        None => Library::Libdevice.package().to_string(),
    };
    Err(GpuError::Library { library: Library::Libdevice, advice })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn folder(name: &str) -> PathBuf {
        let path = std::env::temp_dir().join(format!("backend-dist-gpu-{}-{name}", std::process::id()));
        std::fs::create_dir_all(&path).unwrap();
        path
    }

    fn touch(path: PathBuf) {
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, "").unwrap();
    }

    #[test]
    fn a_library_that_is_nowhere_is_named_with_its_package() {
        let text = Library::Nccl.missing(&[folder("nothing")]).to_string();
        assert!(text.starts_with("NCCL (libnccl.so) cannot be loaded: install libnccl-dev"), "{text}");
        let text = Library::Driver.missing(&[]).to_string();
        assert!(text.contains("libcuda.so.1") && text.contains("nvidia-driver"), "{text}");
    }

    /// Wheels and Debian's libnccl2 have `libnccl.so.2` only; the loader searches for `libnccl.so`.
    #[test]
    fn a_library_under_another_name_is_pointed_out() {
        let root = folder("wheels");
        touch(root.join("lib/python3.12/site-packages/nvidia/nccl/lib/libnccl.so.2"));
        let folders = wheels(&root);
        assert_eq!(folders, [root.join("lib/python3.12/site-packages/nvidia/nccl/lib")]);
        let text = Library::Nccl.missing(&folders).to_string();
        assert!(text.contains("nccl/lib/libnccl.so.2 is there") && text.contains("ln -s libnccl.so.2"), "{text}");
        touch(folders[0].join("libnccl.so"));
        let text = Library::Nccl.missing(&folders).to_string();
        assert!(text.contains("nccl/lib/libnccl.so is there") && text.contains("LD_LIBRARY_PATH"), "{text}");
        std::fs::remove_dir_all(root).unwrap();
    }

    #[test]
    fn libdevice_is_looked_for_where_the_compiler_looks() {
        let root = folder("toolkit");
        let other = folder("elsewhere");
        touch(root.join("nvvm/libdevice/libdevice.10.bc"));
        assert_eq!(libdevice_in(None, &[other.clone(), root.clone()]), Ok(root.join("nvvm/libdevice/libdevice.10.bc")));
        let error = libdevice_in(Some(other.clone()), std::slice::from_ref(&root)).unwrap_err();
        assert!(error.to_string().contains("CUDA_PATH is "), "{error}");
        std::fs::remove_dir_all(root).unwrap();
        std::fs::remove_dir_all(other).unwrap();
    }
}
