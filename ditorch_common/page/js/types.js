/**
 * What the other modules speak of; nothing of this file reaches the page.
 *
 * @typedef {string | Record<string, string>} Text
 * @typedef {{kind: string, [key: string]: any}} Block
 * @typedef {{id: string, title: Text, blocks: Block[], empty: Text}} View
 * @typedef {{title: string, subtitle: Text, language: string, views: View[], tables: Record<string, number>,
 *   version?: number}} Head
 * @typedef {Uint8Array | Uint16Array | Int16Array | Uint32Array | Int32Array | Float32Array | Float64Array} Values
 *
 * One column of a table; what is worked out from it is kept with it.
 * @typedef {object} ColumnData
 * @property {string} name
 * @property {Text} title
 * @property {string} kind  number, flag, text, code, verdict or link
 * @property {string} unit
 * @property {number | null} digits
 * @property {Values} values
 * @property {string[]} words  what the values count in, for texts
 * @property {string[]} [lower]  the same in lower case
 * @property {Uint32Array} [ranks]  the place of each word in their order
 * @property {Record<string, Uint32Array>} orders  rows in order, up and down
 *
 * @typedef {{name: string, rows: number, columns: ColumnData[]}} TableData
 *
 * What a user asks of a table.
 * @typedef {{search: string, filters: Record<string, string>, sort: [string, string] | null}} Query
 *
 * What a block may use besides itself.
 * @typedef {object} Context
 * @property {(name: string) => Promise<TableData>} table
 * @property {Params} params  the part of the address that is this block's
 * @property {string} place  the same for a block of the same view when the page is shown again
 * @property {Map<string, any>} memory  what is kept by place: open nodes, scroll positions
 * @property {() => Params} tableParams  those of the next table
 *
 * @typedef {{get: (name: string) => string, set: (values: Record<string, string>) => void,
 *   names: () => string[]}} Params
 *
 * What a block becomes: an element; refresh takes new data where the block can keep its state. An element that does not yet
 * have its height has it when `ready` is done.
 * @typedef {{element: HTMLElement, ready?: Promise<void>, refresh?: () => Promise<void>, markdown?: () => string}} Shown
 *
 * @typedef {{show: (block: Block, context: Context) => Shown, markdown: (block: Block) => string}} Kind
 */

export const TYPES = true;
