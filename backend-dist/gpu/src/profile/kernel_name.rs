//! Readable names of kernels.

/// The function of a C++ symbol without its parameters and template arguments; other names unchanged.
///
/// Implements the part of the Itanium C++ ABI (5.1, "External Names") that kernels' names use: `_Z`, then either a
/// length and a name, or `N`, lengths and names, and an end.
pub fn readable(symbol: &str) -> String {
    let Some(rest) = symbol.strip_prefix("_Z") else { return symbol.into() };
    let mut rest = rest.strip_prefix('N').unwrap_or(rest).trim_start_matches(['K', 'V', 'r', 'L']);
    let mut names = Vec::new();
    let nested = symbol.starts_with("_ZN");
    while let Some((name, tail)) = part(rest) {
        // GCC's name of an anonymous namespace.
        if !name.starts_with("_GLOBAL__N_") && !name.starts_with("_INTERNAL_") {
            names.push(name);
        }
        rest = tail;
        if !nested {
            break;
        }
    }
    if names.is_empty() { symbol.into() } else { names.join("::") }
}

/// A length, a name of this length, and the rest.
fn part(text: &str) -> Option<(&str, &str)> {
    let digits = text.find(|c: char| !c.is_ascii_digit())?;
    let length: usize = text[..digits].parse().ok()?;
    text[digits..].split_at_checked(length)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn symbols_lose_their_parameters() {
        for (symbol, name) in [
            ("nvjet_hsh_192x192_64x4_2x1_v_bz_coopB_NTT", "nvjet_hsh_192x192_64x4_2x1_v_bz_coopB_NTT"),
            (
                "_Z31ncclDevKernel_AllGather_RING_LL24ncclDevKernelArgsStorageILm4096EE",
                "ncclDevKernel_AllGather_RING_LL",
            ),
            ("_ZN7cutlass13device_kernelIN5flash10SomeKernelEEEvNT_6ParamsE", "cutlass::device_kernel"),
            ("_ZN12_GLOBAL__N_14copyEv", "copy"),
            ("_Z", "_Z"),
            ("_Z99short", "_Z99short"),
        ] {
            assert_eq!(readable(symbol), name);
        }
    }
}
