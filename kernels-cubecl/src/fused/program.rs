//! What a fused kernel computes: steps on registers, of which every row of a matrix has its own.

/// Units that a row may have, and vectors of each: registers hold every step's.
pub(super) const MOST: [usize; 2] = [512, 4];

/// Numbers of the widest vectors of which rows of this length consist.
pub(super) fn vector(columns: usize) -> usize {
    [8, 4, 2].into_iter().find(|n| columns.is_multiple_of(*n)).unwrap_or(1)
}

/// Whether a kernel can hold rows of this length in registers.
pub fn row_fits(columns: usize) -> bool {
    columns / vector(columns) <= MOST[0] * MOST[1]
}

/// Whether a kernel can sum all rows of this length, for which it also needs them in registers.
pub fn rows_can_be_summed(columns: usize) -> bool {
    row_fits(columns) && columns.is_multiple_of(4)
}

/// The number of the step that made a register.
pub type Register = usize;

/// One step. It makes the register of its number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Step {
    /// The input of this number.
    Load(usize),
    /// The scalar of this number, which may differ between launches of one kernel.
    Scalar(usize),
    /// A function of a number.
    Unary(Unary, Register),
    /// A function of two.
    Binary(Binary, Register, Register),
    /// A number over all columns of a row.
    Reduce(Reduce, Register),
    /// Random zeros and ones, from the draw of this number.
    Bernoulli(usize),
}

/// Functions of one number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(missing_docs, reason = "named as the functions of Burn's tensors")]
pub enum Unary {
    Exp,
    Log,
    Log1p,
    Sqrt,
    Recip,
    Tanh,
    Erf,
    Abs,
    Neg,
    Sin,
    Cos,
    Sigmoid,
    Relu,
    Gelu,
}

/// Functions of two numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(missing_docs, reason = "named as the functions of Burn's tensors")]
pub enum Binary {
    Add,
    Sub,
    Mul,
    Div,
    Max,
    Min,
    /// The gradient of GELU's input from that input and the output's gradient.
    GeluGrad,
    /// The gradient of a ReLU's input from the output and its gradient.
    ReluGrad,
    /// The gradient of a sigmoid's input from the output and its gradient.
    SigmoidGrad,
    /// The first where the second is zero, else zero.
    Unless,
}

/// Functions of a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(missing_docs, reason = "named as the functions of Burn's tensors")]
pub enum Reduce {
    Sum,
    Max,
}

/// Which numbers of an `[rows, columns]` matrix a buffer has.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Extent {
    /// All: `[rows, columns]`.
    Whole,
    /// One for each row, in f32: `[rows]`.
    PerRow,
    /// One for each column: `[columns]`.
    PerColumn,
    /// One, in f32.
    Single,
    /// Rows `[fewer, columns]`, each for several rows of the matrix, as the input's [`Sharing`] says.
    Shared,
    /// One for each of such rows, in f32.
    SharedPerRow,
}

impl Extent {
    /// Whether it has no columns.
    pub fn is_narrow(self) -> bool {
        matches!(self, Self::PerRow | Self::Single | Self::SharedPerRow)
    }

    /// Whether rows of the matrix share its rows.
    pub fn is_shared(self) -> bool {
        matches!(self, Self::Shared | Self::SharedPerRow)
    }
}

/// Which row of a shared input belongs to row `[i, j, k]` of a matrix: `i`, `j` and `k` times the strides.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Sharing {
    /// How many `j` and `k` there are.
    pub sizes: [u32; 2],
    /// Rows of the input from one `i`, `j` and `k` to the next; zero if they share a row.
    pub strides: [u32; 3],
}

impl Sharing {
    /// The input's row for the matrix's.
    pub fn row(self, row: usize) -> usize {
        let ([js, ks], [i, j, k]) = (self.sizes.map(|x| x as usize), self.strides.map(|x| x as usize));
        row / ks / js * i + row / ks % js * j + row % ks * k
    }

    /// How many rows the input has if the matrix has so many.
    #[cfg(feature = "cuda")]
    pub(super) fn rows(self, rows: usize) -> usize {
        if rows == 0 { 0 } else { self.row(rows - 1) + 1 }
    }
}

/// Number types of buffers. Registers are f32.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Element {
    /// f32.
    F32,
    /// bf16 or f16, one of them in a program.
    Half,
}

/// A buffer that is read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Input {
    /// Which numbers it has.
    pub extent: Extent,
    /// Their type.
    pub element: Element,
}

/// A buffer that is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Output {
    /// What is written to it.
    pub register: Register,
    /// Whether the whole register; of one that a row shares, one number for each row; or the sum of all rows, one f32 number
    /// for each column.
    pub extent: Extent,
    /// The type of its numbers.
    pub element: Element,
}

/// The computation of one launch.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Program {
    /// The buffers that are read.
    pub inputs: Vec<Input>,
    /// How many scalars there are.
    pub scalars: usize,
    /// How many draws of random numbers.
    pub draws: usize,
    /// What is done, in this order.
    pub steps: Vec<Step>,
    /// The buffers that are written.
    pub outputs: Vec<Output>,
}

impl Program {
    /// Whether a row is reduced, or an input has not all numbers, so that the kernel must know where rows end.
    pub fn has_rows(&self) -> bool {
        self.steps.iter().any(|step| matches!(step, Step::Reduce(..)))
            || self.inputs.iter().any(|input| !matches!(input.extent, Extent::Whole | Extent::Single))
            || self.outputs.iter().any(|output| output.extent != Extent::Whole)
    }

    /// Number of reductions.
    pub fn reductions(&self) -> usize {
        self.steps.iter().filter(|step| matches!(step, Step::Reduce(..))).count()
    }

    /// Number of outputs that are sums of all rows.
    pub fn sums(&self) -> usize {
        self.sum_place(self.outputs.len())
    }

    /// Where output `output` stands among the sums.
    pub(super) fn sum_place(&self, output: usize) -> usize {
        self.outputs[..output].iter().filter(|output| output.extent == Extent::PerColumn).count()
    }

    /// Where input `input` stands among those of its extent and element type.
    pub fn place(&self, input: usize) -> usize {
        let list = |input: Input| (input.extent.is_narrow(), input.element);
        self.inputs[..input].iter().filter(|other| list(**other) == list(self.inputs[input])).count()
    }

    /// Where input `input` stands among those that rows share.
    pub(super) fn share(&self, input: usize) -> usize {
        self.inputs[..input].iter().filter(|other| other.extent.is_shared()).count()
    }

    /// Where output `output` stands among those of its extent and element type.
    pub fn output_place(&self, output: usize) -> usize {
        let list = |output: Output| (output.extent.is_narrow(), output.element);
        self.outputs[..output].iter().filter(|other| list(**other) == list(self.outputs[output])).count()
    }
}
