//! How an exchange and the product beside it are cut into pieces, so that one piece is exchanged while another is computed.
//! Pure arithmetic.

/// Bytes per second between the GPUs of a host, roughly: what NCCL reaches over NVLink 4.
const LINK: f64 = 300e9;
/// Operations per second of matrix products in 16 bits, roughly: what cuBLASLt reaches on Hopper.
const PRODUCTS: f64 = 600e12;
/// Seconds that a piece costs by itself: one more exchange, one more product.
const PIECE: f64 = 15e-6;
/// The host queues every piece, so there are few.
const MOST: usize = 4;

/// An exchange, the product that needs it or that it needs, and what else runs meanwhile.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Load {
    /// Bytes that each rank receives.
    pub bytes: usize,
    /// Multiplications and additions of the product.
    pub flops: f64,
    /// Multiplications and additions of another product that does not wait for the exchange.
    pub meanwhile: f64,
    /// Bytes of an element of the product.
    pub element: usize,
}

impl Load {
    /// Seconds until both products and the exchange are done, if product and exchange are cut into `pieces`.
    fn seconds(&self, pieces: usize) -> f64 {
        let rate = PRODUCTS * 2.0 / self.element.max(2) as f64;
        let (exchange, product, meanwhile) = (self.bytes as f64 / LINK, self.flops / rate, self.meanwhile / rate);
        let n = pieces as f64;
        // The first piece of one and the last of the other have nothing beside them.
        let both = (exchange + product) / n + exchange.max(product) * (n - 1.0) / n;
        both.max(product + meanwhile) + n * PIECE
    }
}

/// Rows of a matrix in equal parts, one for each rank, and each part in equal pieces.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Cut {
    /// Rows of a piece of a part.
    pub rows: usize,
    /// Parts.
    pub parts: usize,
    /// Pieces of a part.
    pub pieces: usize,
}

impl Cut {
    /// The quickest cut of parts of `part` rows: 1, 2 or 4 pieces, without remainder.
    pub(crate) fn quickest(part: usize, parts: usize, load: &Load) -> Self {
        let all = (0..).map(|i| 1 << i).take_while(|&pieces| pieces <= MOST);
        let legal = all.filter(|&pieces| part.is_multiple_of(pieces));
        let pieces = legal.min_by(|&a, &b| load.seconds(a).total_cmp(&load.seconds(b))).unwrap_or(1);
        Self { rows: part / pieces, parts, pieces }
    }

    /// First row of piece `piece` of part 0; those of the other parts lie [`part`](Self::part) rows apart.
    pub(crate) fn first(&self, piece: usize) -> usize {
        piece * self.rows
    }

    /// Rows of a part.
    pub(crate) fn part(&self) -> usize {
        self.rows * self.pieces
    }

    /// First row of piece `piece` of all parts where the pieces lie one after the other, each with all its parts.
    pub(crate) fn staged(&self, piece: usize) -> usize {
        piece * self.parts * self.rows
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: usize = 1 << 30;

    /// A product of `[tokens, inputs]` by `[outputs, inputs]` in bf16 whose input is gathered by `ranks`.
    fn gathered(tokens: usize, inputs: usize, outputs: usize, ranks: usize) -> Load {
        let bytes = tokens * inputs * 2 * (ranks - 1) / ranks;
        Load { bytes, flops: 2.0 * (tokens * inputs * outputs) as f64, meanwhile: 0.0, element: 2 }
    }

    fn pieces(part: usize, load: Load) -> usize {
        Cut::quickest(part, 2, &load).pieces
    }

    #[test]
    fn small_tensors_stay_whole() {
        assert_eq!(pieces(64, gathered(128, 64, 64, 2)), 1);
        assert_eq!(pieces(512, gathered(1024, 1024, 1024, 2)), 1);
    }

    #[test]
    fn large_ones_are_cut() {
        // Llama-3-8B, sequence 8192: QKV and the MLP's first layer over 8 ranks.
        assert_eq!(pieces(1024, gathered(8192, 4096, 768, 8)), 2);
        assert_eq!(pieces(1024, gathered(8192, 4096, 3584, 8)), 4);
        // Over 2 ranks the product is much longer than the exchange.
        assert_eq!(pieces(4096, gathered(8192, 4096, 14336, 2)), 2);
    }

    #[test]
    fn pieces_have_no_remainder() {
        let load = Load { bytes: GIB, flops: 1e12, meanwhile: 0.0, element: 2 };
        assert_eq!([1, 2, 3, 6, 4, 12].map(|part| pieces(part, load)), [1, 2, 1, 2, 4, 4]);
    }

    #[test]
    fn what_hides_behind_another_product_is_not_cut() {
        let load = gathered(8192, 4096, 3584, 8);
        assert_eq!(pieces(1024, Load { meanwhile: load.flops, ..load }), 1);
        let short = gathered(8192, 4096, 768, 8);
        assert_eq!(pieces(1024, Load { meanwhile: short.flops / 8.0, ..short }), 2);
    }

    /// Every rank's part is sent piece by piece to its place in the whole, which is multiplied piece by piece.
    #[test]
    fn gathered_pieces_fill_the_whole_in_order() {
        for (rows, parts, pieces) in [(3, 2, 4), (1, 4, 2), (5, 3, 1)] {
            let cut = Cut { rows, parts, pieces };
            let whole: Vec<usize> = (0..parts * cut.part()).collect();
            let (mut gathered, mut product) = (vec![None; whole.len()], vec![None; whole.len()]);
            for piece in 0..pieces {
                for part in 0..parts {
                    let own = &whole[part * cut.part()..][..cut.part()];
                    for row in cut.first(piece)..cut.first(piece) + rows {
                        assert_eq!(gathered[part * cut.part() + row].replace(own[row]), None);
                    }
                }
                for part in 0..parts {
                    for row in part * cut.part() + cut.first(piece)..part * cut.part() + cut.first(piece) + rows {
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
        for (rows, parts, pieces) in [(3, 2, 4), (1, 4, 2), (5, 3, 1)] {
            let cut = Cut { rows, parts, pieces };
            let mut staged = vec![None; parts * cut.part()];
            let mut sums = vec![vec![None; cut.part()]; parts];
            for piece in 0..pieces {
                // A batch of `parts` matrices into a run without gaps.
                let from =
                    (0..parts).flat_map(|part| (0..rows).map(move |row| part * cut.part() + cut.first(piece) + row));
                for (place, row) in from.enumerate() {
                    assert_eq!(staged[cut.staged(piece) + place].replace(row), None);
                }
                // A reduce-scatter of that run.
                for (part, sum) in sums.iter_mut().enumerate() {
                    for row in 0..rows {
                        sum[cut.first(piece) + row] = staged[cut.staged(piece) + part * rows + row];
                    }
                }
            }
            for (part, sum) in sums.into_iter().enumerate() {
                let expected: Vec<_> = (part * cut.part()..(part + 1) * cut.part()).map(Some).collect();
                assert_eq!(sum, expected);
            }
        }
    }
}
