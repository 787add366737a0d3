//! Layouts in words, such as `TP2 SP DP4 ZeRO3 Group2`.

use super::{LayoutError, ParallelLayout};
use std::fmt;
use std::str::FromStr;

/// Shows what differs from one rank, for example `TP2 SP DP2`; one rank is `TP1`.
impl fmt::Display for ParallelLayout {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let sizes = [
            ("TP", self.tp),
            ("SP", usize::from(self.sp)),
            ("CP", self.cp),
            ("EP", self.ep),
            ("ETP", self.etp.unwrap_or(1)),
            ("PP", self.pp),
            ("VPP", self.vpp),
            ("DP", self.dp),
            ("ZeRO", usize::from(self.zero)),
            ("Group", self.zero_group.unwrap_or(1)),
        ];
        let mut words: Vec<String> = Vec::new();
        for (name, size) in sizes {
            match (name, size) {
                ("SP", 1) => words.push("SP".into()),
                ("SP", _) | ("ZeRO", 0) => {}
                ("ETP", size) if self.etp.is_some() => words.push(format!("ETP{size}")),
                ("ZeRO", size) => words.push(format!("ZeRO{size}")),
                ("Group", size) if self.zero_group.is_some() => words.push(format!("Group{size}")),
                (_, 1) => {}
                (name, size) => words.push(format!("{name}{size}")),
            }
        }
        if words.is_empty() {
            words.push("TP1".into());
        }
        f.write_str(&words.join(" "))
    }
}

/// Reads what `Display` writes; `+`, `,`, `x` between words and any letter case are accepted too (`tp2+sp,dp2`).
impl FromStr for ParallelLayout {
    type Err = LayoutError;

    fn from_str(text: &str) -> Result<Self, LayoutError> {
        let (mut layout, mut names) = (Self::default(), Vec::new());
        for word in text.split(|c: char| c.is_whitespace() || "+,x×".contains(c)).filter(|word| !word.is_empty()) {
            let wrong = || LayoutError::Word { word: word.to_string() };
            let upper = word.to_ascii_uppercase();
            let name = upper.trim_end_matches(|c: char| c.is_ascii_digit()).to_string();
            if names.contains(&name) {
                return Err(LayoutError::Twice { name });
            }
            names.push(name);
            if upper == "SP" {
                layout.sp = true;
                continue;
            }
            let digits = upper.find(|c: char| c.is_ascii_digit()).ok_or_else(wrong)?;
            let size: usize = upper[digits..].parse().map_err(|_| wrong())?;
            match &upper[..digits] {
                "TP" => layout.tp = size,
                "CP" => layout.cp = size,
                "EP" => layout.ep = size,
                "ETP" => layout.etp = Some(size),
                "PP" => layout.pp = size,
                "VPP" => layout.vpp = size,
                "DP" => layout.dp = size,
                "GROUP" => layout.zero_group = Some(size),
                "ZERO" => layout.zero = u8::try_from(size).map_err(|_| wrong())?,
                _ => return Err(wrong()),
            }
        }
        layout.check()?;
        Ok(layout)
    }
}
