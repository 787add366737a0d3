//! The algorithms that cuBLASLt suggests for a GEMM.

use cudarc::cublaslt::{result, sys};

use super::WORKSPACE;
use super::plan::{Plan, bytes, name};

/// Number of suggestions; the first one that is supported is used.
const CANDIDATES: usize = 8;

impl Plan {
    /// cuBLASLt's suggestions for pointers aligned to `[a, b, output]` bytes.
    pub(super) fn heuristic(
        &self,
        handle: sys::cublasLtHandle_t,
        [a, b, out]: [u32; 3],
    ) -> Result<Vec<sys::cublasLtMatmulAlgo_t>, String> {
        use sys::cublasLtMatmulPreferenceAttributes_t as Preference;
        let failed = |error| format!("cublasLtMatmulAlgoGetHeuristic: {}", name(error));
        let preference = result::create_matmul_pref().map_err(failed)?;
        // Split-K partial sums are never added in 16 bits.
        let reductions = sys::cublasLtReductionScheme_t::CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE as u32;
        let settings = [
            (Preference::CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, reductions),
            (Preference::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, b),
            (Preference::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, a),
            (Preference::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, out),
            (Preference::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, out),
        ];
        // SAFETY: an all-zero result is a valid value of the plain C struct (status 0 is success).
        let mut found: [sys::cublasLtMatmulHeuristicResult_t; CANDIDATES] = unsafe { std::mem::zeroed() };
        let mut count = 0;
        // SAFETY: preference, descriptors and layouts are alive; the attributes have the sizes given (64 bits for the
        // workspace, 32 for the others); `found` has room for all suggestions.
        let status = unsafe {
            let set = |attribute, value, size| result::set_matmul_pref_attribute(preference, attribute, value, size);
            let mut status = set(Preference::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, bytes(&WORKSPACE), 8);
            for (attribute, value) in &settings {
                status = status.and_then(|()| set(*attribute, bytes(value), 4));
            }
            let status = status.and_then(|()| {
                sys::cublasLtMatmulAlgoGetHeuristic(
                    handle,
                    self.operation,
                    self.first,
                    self.second,
                    self.out,
                    self.out,
                    preference,
                    CANDIDATES as i32,
                    found.as_mut_ptr(),
                    &mut count,
                )
                .result()
            });
            status.and(result::destroy_matmul_pref(preference))
        };
        status.map_err(failed)?;
        let works = |found: &&sys::cublasLtMatmulHeuristicResult_t| {
            found.state == sys::cublasStatus_t::CUBLAS_STATUS_SUCCESS && found.workspaceSize <= WORKSPACE
        };
        Ok(found[..count as usize].iter().filter(works).map(|found| found.algo).collect())
    }
}
