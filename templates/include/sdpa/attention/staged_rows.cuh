// A tile on its way out of a CTA of mma.sync: staged in shared memory by the lanes that accumulated it, stored 16 bytes
// a lane by those that have neighbouring columns. Every warp stages and stores its own rows.
//
// Shared memory has atoms of 8 rows and kSmemCols columns, as Swizzle<log2(kVectors), 3, 3> permutes the vectors of 8
// columns, kRows of these rows one column of atoms after the other. So vector v of a row lies at
//   (base ^ v % kVectors · 8) + v / kVectors · (kRows · kSmemCols),   base = row · kSmemCols + key(row) · 8
// elements. A compiler that is given the layout computes all of it for each access.
#pragma once

#include <cstdint>

#include "sdpa/attention/params.hpp"

namespace sdpa {

template <class Element, int kRows, int kHeadDim, int kSmemCols, int kMmaM>
struct StagedRows {
  using Vector = uint4;  // 8 elements

  static constexpr int kVectors = kSmemCols / 8;  // of an atom's row
  static constexpr int kVectorsPerRow = kHeadDim / 8;
  static constexpr int kRowsOfWarp = 16;            // neighbours, kMmaM times
  static constexpr int kRowsApart = kRows / kMmaM;  // from one time to the next
  static constexpr bool kStoresWholeRows = 32 % kVectorsPerRow == 0;

  SDPA_DEVICE static constexpr int key(int row) { return row * kSmemCols / 64 % kVectors; }
  SDPA_DEVICE static constexpr int base(int row) { return row * kSmemCols + key(row) * 8; }
  SDPA_DEVICE static constexpr int vector_at(int base, int v) {
    return (base ^ v % kVectors * 8) + v / kVectors * (kRows * kSmemCols);
  }

  // Where row i of a thread's accumulator (rows, cols) lies in the tile: behind its row 0, of the same key.
  SDPA_DEVICE static constexpr int rows_behind_first(int i) { return i / 2 * kRowsApart + i % 2 * 8; }
  SDPA_DEVICE static constexpr int row(int tid, int i) {
    return tid / 32 * kRowsOfWarp + tid % 32 / 4 + rows_behind_first(i);
  }

  // word(i, j): columns j and j + 1 of row i of this thread's accumulator.
  template <class Word>
  SDPA_DEVICE static void stage(Element *room, int tid, const Word &word) {
    const int first = base(row(tid, 0)) + tid % 4 * 2;
    CUTE_UNROLL
    for (int i = 0; i < 2 * kMmaM; ++i) {
      CUTE_UNROLL
      for (int j = 0; j < kHeadDim / 4; j += 2)
        *reinterpret_cast<uint32_t *>(room + rows_behind_first(i) * kSmemCols + vector_at(first, j / 2)) = word(i, j);
    }
  }

  // The tile's rows are those from `first_row` on, of num_rows; row 0 is at `to`.
  SDPA_DEVICE static void store(const Element *room, int tid, Element *to, int64_t row_stride, int first_row,
                                int num_rows, int num_cols) {
    if constexpr (kStoresWholeRows) {
      constexpr int kRowsOfPass = 32 / kVectorsPerRow;
      const int lane = tid % 32, row = tid / 32 * kRowsOfWarp + lane / kVectorsPerRow, v = lane % kVectorsPerRow;
      const int rows_left = v * 8 < num_cols ? num_rows - first_row - row : 0;
      const int from = vector_at(base(row), v);
      to += (first_row + row) * row_stride + v * 8;
      CUTE_UNROLL
      for (int m = 0; m < kMmaM; ++m) {
        Element *to_row = to + m * kRowsApart * row_stride;
        CUTE_UNROLL
        for (int pass = 0; pass < kRowsOfWarp; pass += kRowsOfPass) {
          const int further = m * kRowsApart + pass;
          if (further < rows_left)
            *reinterpret_cast<Vector *>(to_row) =
                *reinterpret_cast<const Vector *>(room + further * kSmemCols + (from ^ key(pass) * 8));
          to_row += kRowsOfPass * row_stride;
        }
      }
    } else {
      store_each(room, tid, first_row, num_rows, num_cols,
                 [&](int row) SDPA_INLINE_LAMBDA { return to + row * row_stride; });
    }
  }

  // The same with rows anywhere: row_at(row) is where a row begins.
  template <class RowAt>
  SDPA_DEVICE static void store_each(const Element *room, int tid, int first_row, int num_rows, int num_cols,
                                     const RowAt &row_at) {
    const int lane = tid % 32;
    CUTE_UNROLL
    for (int m = 0; m < kMmaM; ++m) {
      CUTE_UNROLL
      for (int pass = 0; pass < kRowsOfWarp * kVectorsPerRow / 32; ++pass) {
        const int index = pass * 32 + lane;
        const int row = m * kRowsApart + tid / 32 * kRowsOfWarp + index / kVectorsPerRow, v = index % kVectorsPerRow;
        if (first_row + row < num_rows && v * 8 < num_cols)
          *reinterpret_cast<Vector *>(row_at(first_row + row) + v * 8) =
              *reinterpret_cast<const Vector *>(room + vector_at(base(row), v));
      }
    }
  }
};

}  // namespace sdpa
