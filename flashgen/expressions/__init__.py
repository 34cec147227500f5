"""What a caller does to scores by expressions of his own: read, differentiated, bounded, written as Triton, computed.

Reading order: nodes (what there is), parse (Python text or functions to nodes), typed (which operand is what), derive,
bounds (of whole blocks), emit (as Triton), evaluate (in torch), given (what a caller gives, judged). An expression is
a closed language: reading one runs nothing.
"""
