//! How a product is cut into two, so that an exchange runs beside one of them. Pure arithmetic.
//!
//! On Hopper the library's products take all multiprocessors until they end, and an exchange needs some for itself:
//! beside a product that was not told to leave it any it only makes the product end later
//! (<https://github.com/pytorch/pytorch/issues/143988>). One that leaves some is slower all the time. So what runs
//! beside an exchange should take about as long as the exchange, and the rest follows with all multiprocessors.

/// Bytes per second between the GPUs of a host, roughly: what NCCL reaches over NVLink 4 while nothing else runs.
const ALONE: f64 = 280e9;
/// The same beside products, of two H200s.
const BESIDE: f64 = 160e9;
/// Seconds that an exchange takes however small it is.
const LATENCY: f64 = 10e-6;
/// Operations per second of matrix products in 16 bits, roughly: what cuBLASLt reaches on Hopper.
const PRODUCTS: f64 = 650e12;
/// Multiprocessors of an H100 or H200.
const PROCESSORS: usize = 132;
/// Of them are left to an exchange: as many as NCCL takes at most within a host.
pub(crate) const LEFT: usize = 32;
/// Rows and columns of the result that a multiprocessor computes at once.
const TILE: [usize; 2] = [128, 256];
/// Seconds that one more product or exchange costs, which the host must queue too.
pub(crate) const PIECE: f64 = 15e-6;
/// Cuts are tried at multiples of this share of the rows.
const SHARES: usize = 16;

/// `[rows, inner] · [inner, columns]`, with elements of this many bytes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Product {
    pub rows: usize,
    pub inner: usize,
    pub columns: usize,
    pub element: usize,
}

impl Product {
    /// Seconds for `rows` of the rows in `parts` separate blocks, on all multiprocessors but `left`.
    pub(crate) fn seconds(&self, rows: usize, parts: usize, left: usize) -> f64 {
        let tiles = parts * (rows / parts).div_ceil(TILE[0]) * self.columns.div_ceil(TILE[1]);
        let rate = PRODUCTS / PROCESSORS as f64 * 2.0 / self.element.max(2) as f64;
        let tile = 2.0 * (TILE[0] * TILE[1] * self.inner) as f64 / rate;
        // The library takes smaller tiles where these would leave multiprocessors without work.
        (tiles as f64 / (PROCESSORS - left) as f64).max(0.5) * tile
    }

    /// How many of the rows come first and leave multiprocessors to an exchange of `bytes` that runs beside them; the
    /// rest follows. All of them if the exchange takes longer, none if it is not worthwhile.
    pub(crate) fn beside(&self, bytes: usize) -> usize {
        let exchange = exchange_seconds(bytes, BESIDE);
        let seconds = |first: usize| {
            let rest = self.rows - first;
            let beside = if first > 0 { self.seconds(first, 1, LEFT) } else { 0.0 };
            let after = if rest > 0 { self.seconds(rest, 1, 0) } else { 0.0 };
            let pieces = usize::from(first > 0) + usize::from(rest > 0);
            // What is left of the exchange delays the rest.
            let delay = if rest > 0 { (exchange - beside).max(0.0) } else { 0.0 };
            (beside + delay + after).max(exchange) + pieces as f64 * PIECE
        };
        let cuts = (0..=SHARES).map(|share| if share == SHARES { self.rows } else { round(self.rows, share) });
        cuts.min_by(|&a, &b| seconds(a).total_cmp(&seconds(b))).unwrap_or(0)
    }
}

/// Whether experts with this many features outside and inside are cut into two pieces because of an exchange of `bytes`
/// for each rank. Of the four exchanges in a layer's passes the time of one and a half is hidden then, but what runs
/// beside has fewer multiprocessors, and each of six products more ends while some multiprocessors compute a last tile.
pub fn is_worth_a_piece(bytes: usize, [hidden, intermediate]: [usize; 2]) -> bool {
    let taken = exchange_seconds(bytes, BESIDE) * LEFT as f64 / PROCESSORS as f64;
    // Forward, and gradients of rows, whose inner dimension is twice as long where gate and up are one.
    let inner = 2 * hidden + 3 * intermediate;
    let tile = |inner| 2.0 * (TILE[0] * TILE[1] * inner) as f64 * PROCESSORS as f64 / PRODUCTS;
    1.5 * (exchange_seconds(bytes, ALONE) - taken) > 6.0 * PIECE + tile(inner) / 2.0
}

/// What an exchange of `bytes` takes at this many bytes per second.
fn exchange_seconds(bytes: usize, rate: f64) -> f64 {
    LATENCY + bytes as f64 / rate
}

/// About `share` of all `rows`, in whole tiles where there are enough.
fn round(rows: usize, share: usize) -> usize {
    let part = rows * share / SHARES;
    if rows >= SHARES * TILE[0] { part / TILE[0] * TILE[0] } else { part }
}

/// Rows of a matrix in equal parts, one for each rank, and each part in one or two pieces.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Cut {
    /// Rows of a part.
    pub part: usize,
    /// Parts.
    pub parts: usize,
    /// Rows of a part that are its first piece; what is left is its second.
    pub first: usize,
}

impl Cut {
    /// Parts that are not cut.
    #[cfg(feature = "cuda")]
    pub(crate) fn whole(part: usize, parts: usize) -> Self {
        Self { part, parts, first: part }
    }

    /// The quickest cut where rows are exchanged, `bytes` for each rank, before they are multiplied.
    pub(crate) fn gathered(parts: usize, product: &Product, bytes: usize) -> Self {
        let rows = |of: usize| of * parts;
        Self::quickest(product.rows / parts, parts, |part, first| {
            if first == part {
                return exchange_seconds(bytes, ALONE) + product.seconds(rows(part), 1, 0) + PIECE;
            }
            let one = exchange_seconds(bytes * first / part, ALONE);
            let two = exchange_seconds(bytes * (part - first) / part, BESIDE);
            let beside = product.seconds(rows(first), parts, LEFT);
            one + beside.max(two) + product.seconds(rows(part - first), parts, 0) + 2.0 * PIECE
        })
    }

    /// The quickest cut where products of rows are exchanged, `bytes` for each rank.
    pub(crate) fn scattered(parts: usize, product: &Product, bytes: usize) -> Self {
        let rows = |of: usize| of * parts;
        Self::quickest(product.rows / parts, parts, |part, first| {
            if first == part {
                return product.seconds(rows(part), 1, 0) + exchange_seconds(bytes, ALONE) + PIECE;
            }
            let one = exchange_seconds(bytes * first / part, BESIDE);
            let two = exchange_seconds(bytes * (part - first) / part, ALONE);
            let beside = product.seconds(rows(part - first), parts, LEFT);
            product.seconds(rows(first), parts, 0) + beside.max(one) + two + 2.0 * PIECE
        })
    }

    fn quickest(part: usize, parts: usize, seconds: impl Fn(usize, usize) -> f64) -> Self {
        let cuts = (1..SHARES).map(|share| round(part, share)).filter(|&first| first > 0);
        let all = std::iter::once(part).chain(cuts);
        let first = all.min_by(|&a, &b| seconds(part, a).total_cmp(&seconds(part, b))).unwrap_or(part);
        Self { part, parts, first }
    }

    /// One or two.
    pub(crate) fn pieces(&self) -> usize {
        if self.first == self.part { 1 } else { 2 }
    }

    /// First row of piece `piece` of part 0; those of the other parts lie `part` rows apart.
    pub(crate) fn start(&self, piece: usize) -> usize {
        if piece == 0 { 0 } else { self.first }
    }

    /// Rows of piece `piece` of a part.
    pub(crate) fn rows(&self, piece: usize) -> usize {
        if piece == 0 { self.first } else { self.part - self.first }
    }

    /// First row of piece `piece` of all parts where the pieces lie one after the other, each with all its parts.
    pub(crate) fn staged(&self, piece: usize) -> usize {
        self.start(piece) * self.parts
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// In bf16, of which `ranks` exchange the input or the output.
    fn product(rows: usize, inner: usize, columns: usize) -> Product {
        Product { rows, inner, columns, element: 2 }
    }

    fn bytes(rows: usize, columns: usize, ranks: usize) -> usize {
        rows * columns * 2 / ranks * (ranks - 1)
    }

    #[test]
    fn small_tensors_stay_whole() {
        for (rows, width) in [(128, 64), (1024, 1024)] {
            let (product, bytes) = (product(rows, width, width), bytes(rows, width, 2));
            assert_eq!(Cut::gathered(2, &product, bytes).pieces(), 1);
            assert_eq!(Cut::scattered(2, &product, bytes).pieces(), 1);
            assert!([0, rows].contains(&product.beside(bytes)));
        }
        let tiny = Cut::gathered(2, &product(2, 64, 64), 128);
        assert_eq!((tiny.pieces(), tiny.rows(0)), (1, 1));
    }

    /// Llama-3-8B at sequence 8192: the first layer of the MLP over 2 ranks, whose exchange is short, and over 8.
    #[test]
    fn what_runs_beside_an_exchange_takes_about_as_long() {
        let short = Cut::gathered(2, &product(8192, 4096, 14336), bytes(8192, 4096, 2));
        assert!(short.pieces() == 2 && short.first * 8 <= short.part, "{short:?}");
        let long = Cut::gathered(8, &product(8192, 4096, 3584), bytes(8192, 4096, 8));
        assert!(long.pieces() == 2 && long.first * 4 >= long.part && long.first < long.part, "{long:?}");
        // The second layer leaves a sum: the larger piece comes first where the exchange is short.
        let sum = Cut::scattered(2, &product(8192, 7168, 4096), bytes(8192, 4096, 2));
        assert!(sum.pieces() == 2 && sum.first * 4 > sum.part * 3, "{sum:?}");
    }

    #[test]
    fn a_product_beside_an_exchange_leaves_it_processors_no_longer_than_needed() {
        let product = product(8192, 14336, 4096);
        let first = product.beside(bytes(8192, 4096, 2));
        assert!(first > 0 && first * 4 < product.rows, "{first}");
        let short = Product { columns: 256, ..product };
        assert_eq!(short.beside(1 << 30), short.rows, "the exchange takes longer than all of it");
        assert_eq!(product.beside(0), 0);
    }

    /// 8,192 tokens a rank, of whose rows seven eighths come from other ranks: 128 small experts of which a token uses
    /// eight (Qwen3-30B-A3B), and two of eight large ones (Mixtral 8x7B), whose products end later than the exchange.
    #[test]
    fn experts_are_cut_where_exchanges_are_long_and_tiles_are_short() {
        assert!(is_worth_a_piece(8192 * 8 * 2048 * 2 / 8 * 7, [2048, 768]));
        assert!(!is_worth_a_piece(8192 * 2 * 4096 * 2 / 8 * 7, [4096, 14336]));
    }

    #[test]
    fn pieces_make_up_their_part() {
        for (part, first) in [(7, 7), (7, 3), (1024, 128), (1, 1)] {
            let cut = Cut { part, parts: 4, first };
            let rows: Vec<usize> = (0..cut.pieces()).flat_map(|i| cut.start(i)..cut.start(i) + cut.rows(i)).collect();
            assert_eq!(rows, (0..part).collect::<Vec<_>>());
        }
    }

    /// Every rank's part is sent piece by piece to its place in the whole, which is multiplied piece by piece.
    #[test]
    fn gathered_pieces_fill_the_whole_in_order() {
        for (part, parts, first) in [(12, 2, 3), (2, 4, 1), (5, 3, 5)] {
            let cut = Cut { part, parts, first };
            let whole: Vec<usize> = (0..parts * part).collect();
            let (mut gathered, mut product) = (vec![None; whole.len()], vec![None; whole.len()]);
            for piece in 0..cut.pieces() {
                for member in 0..parts {
                    let own = &whole[member * part..][..part];
                    for row in cut.start(piece)..cut.start(piece) + cut.rows(piece) {
                        assert_eq!(gathered[member * part + row].replace(own[row]), None);
                    }
                }
                for member in 0..parts {
                    for row in cut.start(piece)..cut.start(piece) + cut.rows(piece) {
                        let row = member * part + row;
                        assert_eq!(product[row].replace(10 * gathered[row].expect("gathered before")), None);
                    }
                }
            }
            assert_eq!(product, whole.iter().map(|row| Some(10 * row)).collect::<Vec<_>>());
        }
    }

    /// Every rank multiplies piece by piece; piece `i` of the sum's part `r` comes from what lies staged for it.
    #[test]
    fn scattered_pieces_fill_each_part_in_order() {
        for (part, parts, first) in [(12, 2, 9), (2, 4, 1), (5, 3, 5)] {
            let cut = Cut { part, parts, first };
            let mut staged = vec![None; parts * part];
            let mut sums = vec![vec![None; part]; parts];
            for piece in 0..cut.pieces() {
                let (start, rows) = (cut.start(piece), cut.rows(piece));
                // A batch of `parts` matrices into a run without gaps.
                let from = (0..parts).flat_map(|member| (0..rows).map(move |row| member * part + start + row));
                for (place, row) in from.enumerate() {
                    assert_eq!(staged[cut.staged(piece) + place].replace(row), None);
                }
                // A reduce-scatter of that run.
                for (member, sum) in sums.iter_mut().enumerate() {
                    for row in 0..rows {
                        sum[start + row] = staged[cut.staged(piece) + member * rows + row];
                    }
                }
            }
            for (member, sum) in sums.into_iter().enumerate() {
                let expected: Vec<_> = (member * part..(member + 1) * part).map(Some).collect();
                assert_eq!(sum, expected);
            }
        }
    }
}
